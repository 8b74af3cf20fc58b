"""A round's weights that one peer of each stage keeps for an evaluation while training goes on.

Opened by the hop, which chooses the peers. The peers keep the weights until the stream ends.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from swarm.hop.answers import HopListener, well_formed
from swarm.hop.obstacle import obstacle_of
from swarm.hop.retries import HopLimits
from swarm.rpc.bounds import require_bounds
from swarm.rpc.stream import Stream
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerId, PeerRecord

OpenStub = Callable[[PeerRecord], Any]
"""Gives a StageServiceStub for a peer. It counts as Any: its generated type expects all requests when a call begins."""


class HeldAt(NamedTuple):
    """The peer that holds a round at a stage."""

    peer_id: PeerId
    round: int


class Hold:
    """A round that peers hold until `close`.

    Attributes:
        held: which peer holds which round, from this stage to the last one.
    """

    def __init__(self, stream: Stream, held: Sequence[HeldAt]) -> None:
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
        own = HeldAt(PeerId(record.peer_id), reply.held.round)
        return Hold(stream, [own, *unpack_held(reply.held.later)])


def pack_held(held: Iterable[HeldAt]) -> list[pb.HeldRound]:
    """The held rounds in their wire form."""
    return [pb.HeldRound(peer_id=peer_id, round=number) for peer_id, number in held]


def unpack_held(packed: Iterable[pb.HeldRound]) -> list[HeldAt]:
    """The held rounds in a message, unchecked: they may name peers that are not of these stages."""
    return [HeldAt(PeerId(entry.peer_id), entry.round) for entry in packed]
