"""One attempt as one member runs it: the closed contribution is exchanged. The attempt may be given up at any time.

Made by exchanging/own_round when a leader sends Begin. Rounds, promises and commits are not known here.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.averaging.context import Context
from swarm.averaging.exchanging.allreduce import AllReduceTransport, Average
from swarm.averaging.exchanging.exchange import Closed, Exchanges
from swarm.averaging.exchanging.reduction import MemberFailed, Payload, Reduction, Side
from swarm.averaging.exchanging.shares import Shares
from swarm.averaging.leading.group import Ballot, Refused
from swarm.compression.buffers import Received
from swarm.rpc.wire import CHUNK_BYTES


class Attempt:
    """The attempt for which a member's contribution is closed.

    Attributes:
        closed: the contribution, frozen.
        began_at: when it began to be frozen, by the member's clock.
    """

    def __init__(
        self, context: Context, exchanges: Exchanges, *, ballot: Ballot, closed: Closed, began_at: float
    ) -> None:
        self.ballot = ballot
        self.closed = closed
        self.began_at = began_at
        self._own_id = context.own_id
        self._exchanges = exchanges
        self._clock = context.clock
        self._timing = context.timing
        self._heard_at: dict[str, float] = {}
        """When the last piece of each member's part came."""
        self._shares = Shares(())
        self._side: asyncio.Future[Side] = asyncio.get_running_loop().create_future()
        """This member's side of the exchange, set when the leader sends Average. Other members may call before that."""
        self._scopes: set[asyncio.Timeout] = set()
        """Timeouts around the exchange and around each call of another member. Expiring a timeout ends the block inside
        it."""
        self._sending: set[str] = set()
        """The members that are sending their part, or whose part is just being added."""
        self._end = ""

    def open(self, shares: Shares) -> None:
        """Let the members that the leader has named exchange with this one from now on."""
        self._shares = shares
        self._side.set_result(self._exchanges.open(self.closed, shares))

    async def exchange(self, transport: AllReduceTransport, timeout_seconds: float) -> tuple[Average, float]:
        """Exchange with the other members. Returns the average and the seconds that this took.

        Raises:
            Refused: the attempt was given up, or it took too long.
            MemberFailed: a member failed.
        """
        side = self._side.result()
        try:
            async with self._ends_with_attempt(timeout_seconds):
                watching = asyncio.create_task(self._watch(side))
                try:
                    return await self._exchanges.run(self.closed, self._shares, side, transport, timeout_seconds)
                finally:
                    watching.cancel()
        except TimeoutError:
            reason = self._end or f"it took longer than {timeout_seconds:.1f} s"
            raise Refused(f"attempt {self.ballot.attempt} was given up: {reason}") from None

    def silence_seconds(self) -> float:
        """The seconds of silence after which a member counts as failed. They allow for a slow line and a slow
        processor.

        A member sends to all owners in turn, and has to encode a whole vector before its first message.
        """
        vector_D, timing = self.closed.vector_D, self._timing
        turn_seconds = len(self._shares.members) * CHUNK_BYTES / timing.bytes_per_second
        return timing.silence_seconds + turn_seconds + vector_D.nbytes / timing.work_bytes_per_second

    async def _watch(self, side: Side) -> None:
        """Fail the exchange, and blame the member, once a member answers calls but sends nothing."""
        began_at, seconds = self._clock.monotonic(), self.silence_seconds()
        while side.missing:
            looked_at = self._clock.monotonic()
            await self._clock.sleep(self._timing.heartbeat_seconds)
            if self._clock.monotonic() - looked_at > 2 * self._timing.heartbeat_seconds:
                # This process itself stood still. It has yet to read what others sent in that time.
                began_at = self._clock.monotonic()
            for peer_id in side.missing:
                last_at = max(began_at, self._heard_at.get(peer_id, began_at))
                if peer_id != self._own_id and self._clock.monotonic() - last_at > seconds:
                    reason = f"nothing of its contribution came for {seconds:.1f} s"
                    side.fail(MemberFailed(peer_id, reason, noticed_by=self._own_id))
                    return

    async def serve(self, peer_id: str, shares_digest: str, pieces: AsyncIterator[bytes]) -> Payload:
        """Take another member's part and return the sum; or, in a gather, return this member's contribution.

        Raises:
            Refused: the attempt was given up or has other members, or the caller is sending its part already.
            MemberFailed: the exchange failed, so there will be no answer.
            MalformedMessage: the caller sent more bytes than the part has, or is no member.
        """
        try:
            async with asyncio.timeout(self.silence_seconds()):
                side = await asyncio.shield(self._side)
        except TimeoutError:
            raise Refused("the leader has not named the members here") from None
        if shares_digest != self._shares.digest:
            raise Refused("the member lists differ")
        num_bytes = side.num_bytes_from(peer_id)
        if peer_id in self._sending:
            # Each member gets memory for one part, however often it calls.
            raise Refused(f"{peer_id} is sending its part already")
        self._sending.add(peer_id)
        try:
            received = await self._receive(peer_id, num_bytes, pieces)
            if isinstance(side, Reduction) and peer_id in side.missing:
                await side.add(peer_id, received.whole())
        finally:
            self._sending.discard(peer_id)
        return await side.result()

    async def _receive(self, peer_id: str, num_bytes: int, pieces: AsyncIterator[bytes]) -> Received:
        try:
            async with self._ends_with_attempt(None):
                received = Received(num_bytes)
                async for piece in pieces:
                    received.add(piece)
                    self._heard_at[peer_id] = self._clock.monotonic()
        except TimeoutError:
            raise Refused(f"attempt {self.ballot.attempt} was given up: {self._end}") from None
        return received

    def end(self, reason: str) -> None:
        """Give the attempt up. All calls that wait for it, from here and from other members, end with the reason."""
        self._end = reason
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        if not self._side.done():
            self._side.set_exception(Refused(reason))
            self._side.exception()  # Read here, because asyncio would complain if no caller waited.

    @asynccontextmanager
    async def _ends_with_attempt(self, timeout_seconds: float | None) -> AsyncIterator[None]:
        """End the block with a TimeoutError after `timeout_seconds`, or when the attempt is given up."""
        async with asyncio.timeout(timeout_seconds) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
