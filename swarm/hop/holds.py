"""A round's weights that one peer of each stage keeps for an evaluation while training goes on.

Opened by the hop, which chooses the peers. The peers keep the weights until the stream ends.
"""

from collections.abc import Callable, Sequence
from typing import Any

from swarm.hop.answers import HopListener, well_formed
from swarm.hop.obstacle import obstacle_of
from swarm.hop.retries import HopLimits
from swarm.rpc.bounds import require_bounds
from swarm.rpc.stream import Stream
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord

OpenStub = Callable[[PeerRecord], Any]
"""Gives a StageServiceStub for a peer. It counts as Any: its generated type expects all requests when a call begins."""


class Hold:
    """A round that peers hold until `close`.

    Attributes:
        held: which peer holds which round, from this stage to the last one.
    """

    def __init__(self, stream: Stream, held: Sequence[pb.HeldRound]) -> None:
        self.held = tuple(held)
        self._stream = stream

    def close(self) -> None:
        """Let all these peers drop the round."""
        self._stream.cancel()


class HoldCalls:
    """Asks peers of one stage to hold a round. Each of them asks a peer of the next stage, and so on to the last."""

    def __init__(self, *, address: pb.Address, stub: OpenStub, limits: HopLimits) -> None:
        self._address = address
        self._stub = stub
        self._limits = limits

    async def open(self, record: PeerRecord, newest_round: int, listener: HopListener) -> Hold:
        """Open a hold, as Hop.hold does, at one peer. Raises what `translate` gives. Cancellation ends the stream."""
        request = pb.HoldRequest(address=self._address, newest_round=newest_round)
        async with Stream(self._stub(record).Hold(request)) as stream:
            # The peer gives signs of life while it asks the later stages.
            while not (reply := await stream.read(self._limits.silence_seconds)).HasField("held"):
                if reply.HasField("progress"):
                    listener.progress(reply.progress.stage, obstacle=obstacle_of(reply.progress))
            with well_formed():
                require_bounds(reply.held, finite=True)
        # The answer may name peers of other stages. That does no harm, because they are only hints.
        own = pb.HeldRound(peer_id=record.peer_id, round=reply.held.round)
        return Hold(stream, [own, *reply.held.later])
