"""One peer's part in a session, over one stream: positions go to the peer, and tokens come back.

Used by swarm.hop.continuation, which chooses the peer and takes another one if this one fails. Every wait has a
deadline.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from swarm.errors import PeerUnavailable, SwarmError
from swarm.hop.retries import HopLimits
from swarm.hop.session import Order, Piece, Token, pack_pieces, pack_sampling, unpack_token
from swarm.rpc.stream import Stream
from swarm.rpc.v1 import generation_pb2 as pb
from swarm.rpc.v1 import stage_pb2
from swarm.types import PeerId, PeerRecord

OpenStub = Callable[[PeerRecord], Any]
"""Gives a GenerationServiceStub for a peer. (Its generated type expects all requests when a call begins.)"""


class SessionCall:
    """A stream to one peer. Its errors are those of swarm.errors, and end the stream.

    Attributes:
        peer: the peer at the other end.
        rounds: the rounds whose weights are used at this peer's stage and at all later ones.
    """

    def __init__(
        self, stream: Stream, peer: PeerRecord, order: Order, rounds: Sequence[int], silence_seconds: float
    ) -> None:
        self.peer = peer
        self._order = order
        self.rounds = tuple(rounds)
        self._stream = stream
        self._silence_seconds = silence_seconds
        self._failed: SwarmError | None = None

    @property
    def peer_id(self) -> PeerId:
        """The id of the peer at the other end."""
        return PeerId(self.peer.peer_id)

    @property
    def is_open(self) -> bool:
        """Whether the stream is open, as far as is known."""
        return not self._stream.has_ended

    async def send(self, pieces: Sequence[Piece] = (), *, sample: bool = False) -> None:
        """Send the next positions, or none as a sign of life. Only one task may do so at a time."""
        try:
            async with self._stream as stream:
                await stream.write(pb.GenerateRequest(pieces=pack_pieces(pieces), sample=sample), self._silence_seconds)
        except SwarmError as error:
            self._failed = error
            raise

    async def token(self) -> Token:
        """Wait for the next token. Raises PeerUnavailable if the peer gives no sign of life."""
        try:
            async with self._stream as stream:
                while True:
                    reply = await stream.read(self._silence_seconds)
                    if reply.HasField("sampled"):
                        return unpack_token(reply.sampled, self._order)
        except asyncio.CancelledError:
            # When `send` fails it ends the stream, which the task that reads sees as a cancellation.
            task = asyncio.current_task()
            if self._failed is None or (task is not None and task.cancelling()):
                raise
            raise self._failed from None

    def close(self) -> None:
        """End the session at this peer."""
        self._stream.cancel()


class SessionCalls:
    """Opens sessions at peers of one stage."""

    def __init__(self, *, address: stage_pb2.Address, stub: OpenStub, limits: HopLimits) -> None:
        self._address = address
        self._stub = stub
        self._limits = limits

    async def open(
        self, record: PeerRecord, order: Order, *, rounds: Sequence[int], newest_round: int | None, standby: bool
    ) -> SessionCall:
        """Ask a peer, and through it the later stages, to take a session, or only to hold the round's weights.

        Args:
            rounds: the rounds of the stage and all later ones, if the session has begun with them; otherwise empty.
            newest_round: the round of the stage before, if the session has not begun; None for stage 0.
            standby: whether the peer is only to hold the weights for now.

        Raises:
            Overloaded: the peer has no room for one more.
            RoundMismatch: the peer no longer has that round's weights.
            SwarmError: whatever else `translate` gives.
        """
        opening = pb.SessionOpen(
            address=self._address, rounds=rounds, newest_round=newest_round, num_positions=order.num_positions,
            sampling=pack_sampling(order.sampling), standby=standby,
        )  # fmt: skip
        if order.scoring is not None:
            opening.scoring.CopyFrom(pb.Scoring(first=order.scoring.first, num_top=order.scoring.num_top))
        async with Stream(self._stub(record).Generate()) as stream:
            await stream.write(pb.GenerateRequest(open=opening), self._limits.open_seconds)
            # The peer gives signs of life while it opens the session at later stages.
            while not (reply := await stream.read(self._limits.silence_seconds)).HasField("opened"):
                if reply.HasField("sampled"):
                    raise PeerUnavailable("a token came before the session was opened")
            if not reply.opened.rounds:
                raise PeerUnavailable("an answer without the rounds that are used")
        return SessionCall(stream, record, order, reply.opened.rounds, self._limits.silence_seconds)
