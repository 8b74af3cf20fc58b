"""One member's work in its round: the contribution that it freezes, the attempt, and the attempt's result.

There is at most one of each, and none outlives the round. An attempt may be given up at any time. Never decides
anything about a round.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarm.averaging.agreement.messages import Ballot, MemberFailed, Refused
from swarm.averaging.agreement.place import Place
from swarm.averaging.agreement.shares import Shares
from swarm.averaging.vectors.allreduce import Reduction
from swarm.averaging.vectors.exchange import Closed, Closing, Exchanges, Side
from swarm.averaging.vectors.scrutiny import Newcomers, Scrutiny
from swarm.averaging.vectors.terms import AllReduceTransport, Average
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Payload
from swarm.compression.buffers import Received
from swarm.compression.feedback import Residual
from swarm.events import Abort
from swarm.honesty.comparison import growth_of
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundCost, RoundMember, RoundResult
from swarm.training.sketches import NOTHING_STATED, Stated
from swarm.training.tally import Given

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Exchange:
    """One exchange, from this member's side.

    Attributes:
        heard_at: when the last piece of each member's part came.
        sending: the members that are sending their part, or whose part is just being added.
    """

    shares: Shares
    side: Side
    heard_at: dict[str, float] = field(default_factory=dict)
    sending: set[str] = field(default_factory=set)


class Attempt:
    """The attempt for which a member's contribution is closed. With groups it has several exchanges, one after the
    other; members that are slower may still want something of an earlier one.

    Attributes:
        closed: the contribution, frozen; or what the last exchange averaged, if another one follows.
        began_at: when it began to be frozen, by the member's clock.
        cost: what the attempt has cost so far.
        given: with groups, what this member and others have given by the end of the last exchange.
        amended, exchanges: see Closing.
    """

    def __init__(self, context: Context, *, ballot: Ballot, closing: Closing) -> None:
        self.ballot = ballot
        self.closed = closing.closed
        self.began_at = closing.began_at
        self.amended = closing.amended
        self.exchanges = closing.exchanges
        norm = self.closed.norm if self.closed.contribution.num_samples else 0.0
        self.cost = RoundCost(contribution_norm=norm)
        self.given: Mapping[str, Given] = {}
        self._own_id = context.own_id
        self._clock = context.clock
        self._timing = context.timing
        self._opened: dict[str, _Exchange] = {}
        """By the digest of the shares."""
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the next exchange is opened: the leader has sent Average. Other members may call before that."""
        self._scopes: set[asyncio.Timeout] = set()
        """Timeouts around the exchange and around each call of another member. Expiring a timeout ends the block inside
        it."""
        self._end = ""

    def open(self, shares: Shares) -> None:
        """Let the members that the leader has named exchange with this one from now on. Raises Refused if the attempt
        was given up, or these exchange already."""
        if self._end or shares.digest in self._opened:
            raise Refused(f"attempt {self.ballot.attempt}: {self._end or 'this exchange is under way already'}")
        self._opened[shares.digest] = _Exchange(shares, self.exchanges.open(self.closed, shares))
        self._next.set_result(None)
        self._next = asyncio.get_running_loop().create_future()

    async def exchange(
        self, shares: Shares, transport: AllReduceTransport, timeout_seconds: float
    ) -> tuple[Average, float]:
        """Exchange with the other members. Returns the average and the seconds that this took. Raises Refused if the
        attempt was given up or took too long, and MemberFailed if a member failed."""
        opened = self._opened[shares.digest]
        try:
            async with self._ends_with_attempt(timeout_seconds):
                watching = asyncio.create_task(self._watch(opened))
                try:
                    return await self.exchanges.run(self.closed, shares, opened.side, transport, timeout_seconds)
                finally:
                    watching.cancel()
        except TimeoutError:
            reason = self._end or f"it took longer than {timeout_seconds:.1f} s"
            raise Refused(f"attempt {self.ballot.attempt} was given up: {reason}") from None

    def silence_seconds(self, num_members: int) -> float:
        return self._timing.exchange_silence_seconds(num_members, self.closed.vector_D.nbytes)

    async def _watch(self, opened: _Exchange) -> None:
        """Fail the exchange, and blame the member, once a member answers calls but sends nothing."""
        side = opened.side
        began_at, seconds = self._clock.monotonic(), self.silence_seconds(len(opened.shares.members))
        while side.missing:
            looked_at = self._clock.monotonic()
            await self._clock.sleep(self._timing.heartbeat_seconds)
            if self._clock.monotonic() - looked_at > 2 * self._timing.heartbeat_seconds:
                # This process itself stood still. It has yet to read what others sent in that time.
                began_at = self._clock.monotonic()
            for peer_id in side.missing:
                last_at = max(began_at, opened.heard_at.get(peer_id, began_at))
                if peer_id != self._own_id and self._clock.monotonic() - last_at > seconds:
                    reason = f"nothing of its contribution came for {seconds:.1f} s"
                    side.fail(MemberFailed(peer_id, reason, noticed_by=self._own_id))
                    return

    async def serve(
        self, peer_id: str, shares_digest: str, pieces: AsyncIterator[bytes], stated: Stated = NOTHING_STATED
    ) -> Payload:
        """Take another member's part and return the sum; or, in a gather, return this member's contribution. Raises
        Refused if the attempt was given up or has other members, or the caller is sending its part already,
        MemberFailed if the exchange failed, so there will be no answer, and MalformedMessage if the caller sent more
        bytes than the part has, or is no member."""
        try:
            async with asyncio.timeout(self.silence_seconds(0)):
                while (opened := self._opened.get(shares_digest)) is None:
                    await asyncio.shield(self._next)
        except TimeoutError:
            raise Refused("the leader has not named these members here") from None
        side, num_bytes = opened.side, opened.side.num_bytes_from(peer_id)
        if peer_id in opened.sending:
            # Each member gets memory for one part, however often it calls.
            raise Refused(f"{peer_id} is sending its part already")
        opened.sending.add(peer_id)
        try:
            received = await self._receive(peer_id, num_bytes, pieces, opened)
            if isinstance(side, Reduction) and peer_id in side.missing:
                await side.add(peer_id, received.whole(), stated)
        finally:
            opened.sending.discard(peer_id)
        return await side.result()

    async def _receive(self, peer_id: str, num_bytes: int, pieces: AsyncIterator[bytes], opened: _Exchange) -> Received:
        try:
            async with self._ends_with_attempt(None):
                received = Received(num_bytes)
                async for piece in pieces:
                    received.add(piece)
                    opened.heard_at[peer_id] = self._clock.monotonic()
        except TimeoutError:
            raise Refused(f"attempt {self.ballot.attempt} was given up: {self._end}") from None
        return received

    def end(self, reason: str) -> None:
        self._end = reason
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        if not self._next.done():
            self._next.set_exception(Refused(reason))
            self._next.exception()  # Read here, because asyncio would complain if no caller waited.

    @asynccontextmanager
    async def _ends_with_attempt(self, timeout_seconds: float | None) -> AsyncIterator[None]:
        """End the block with a TimeoutError after `timeout_seconds`, or when the attempt is given up."""
        async with asyncio.timeout(timeout_seconds) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished exchange's result, applied or not.

    Attributes:
        residual: what the error feedback of these exchanges keeps once the result is applied.
        fragment: which part of the member's parameters the result is about.
        began_at: when the contribution began to be frozen, by the member's clock.
    """

    prepared: pb.Prepared
    round_result: RoundResult
    residual: Residual
    exchanges: Exchanges
    fragment: int
    began_at: float


class OwnRound:
    """One member's work in the round at which it stands. Callers hold the place's lock unless a method says otherwise.

    Attributes:
        exchanges: flattens contributions and exchanges them, with the codec of the newest attempt.
        attempt: the attempt for which this member's contribution is closed.
        result: the result of this attempt. Or that of an earlier attempt, if it may have been decided.
    """

    def __init__(self, context: Context, place: Place, member: RoundMember) -> None:
        self._context = context
        self._timeline = place.timeline
        self._lock = place.lock
        self._group = place.group
        self._member = member
        config = place.timeline.at(place.standing.round)
        is_synchronous = config.rounds.synchronous  # Then all members' optimizers have the same past.
        scrutiny = Scrutiny(
            context.own_id, growth=growth_of(is_synchronous=is_synchronous), disproved=member.disproved,
            newcomers=None
            if is_synchronous
            else Newcomers(round_number=lambda: place.standing.round, starts=context.starts),
        )  # fmt: skip
        self.exchanges = Exchanges(config.averaging, context.own_id, scrutiny)
        self._closing: Closing | None = None
        """The contribution that is being frozen, or is frozen; None once the round is reopened or over. Freezing needs
        no lock."""
        self.attempt: Attempt | None = None
        self.result: Result | None = None
        self._given: tuple[Ballot, int] | None = None
        """The last attempt in which this member's contribution became part of a group's average, and which of the
        round's contributions it was."""

    def close(self, drop: frozenset[int], amended: str = "") -> Closing:
        """Freeze the contribution, or join what was begun in the same way. Raises what Timeline.under does."""
        before = self._closing
        if before is not None and (before.drop, before.amended) == (drop, amended):
            return before
        self.exchanges = self.exchanges.under(self._timeline.under(amended).averaging)
        self._closing = Closing(drop, amended, self.exchanges, began_at=self._context.clock.monotonic())
        self._context.tasks.spawn(self._close(self._closing, before))
        return self._closing

    async def _close(self, closing: Closing, before: Closing | None) -> None:
        if before is not None:
            await before.wait()
        failed = False
        try:
            contribution = await self._member.freeze(self._group.round, drop=closing.drop)
            closing.end(await closing.exchanges.flatten(contribution))
        except Exception as error:  # noqa: BLE001 - the attempts that wait for the contribution raise it
            logger.warning("the contribution could not be closed: %s", error)
            closing.end(error)
            failed = True
        async with self._lock:
            if closing is self._closing and (failed or self._group.active is None):
                # Freezing failed, or no attempt is active any more, so nothing will use the contribution.
                await self._member.reopen(self._group.round)
                self._closing = None

    def closing_report(self) -> pb.Closing:
        """Report the progress of freezing the contribution. Needs no lock."""
        activity, now = self._member.activity(), self._context.clock.monotonic()
        waited_seconds = now - self._closing.began_at if self._closing is not None else math.inf
        copying_seconds = activity.num_bytes / self._context.timing.work_bytes_per_second
        return pb.Closing(
            quiet_seconds=min(activity.quiet_seconds, waited_seconds),
            expected_seconds=max(activity.longest_seconds, copying_seconds),
        )

    def begin(self, ballot: Ballot, closing: Closing) -> bool:
        """Begin an attempt with the frozen contribution. Returns False if the attempt was given up, or `closing` was
        replaced."""
        if closing is not self._closing or self._group.active != ballot:
            return False
        self.attempt = Attempt(self._context, ballot=ballot, closing=closing)
        return True

    def go_on(self, attempt: Attempt, closed: Closed, cost: RoundCost, given: Mapping[str, Given]) -> None:
        """Be ready for the next exchange of an attempt in groups, after the one before. `closed` holds what that one
        made, in place of this member's contribution."""
        self._given = attempt.ballot, attempt.closed.contribution.closing
        attempt.closed, attempt.cost, attempt.given = closed, cost, given

    def given_to(self, ballot: Ballot) -> int | None:
        """Which of the round's contributions a group averaged in an attempt; None if none is known to be."""
        return self._given[1] if self._given is not None and self._given[0] == ballot else None

    def end_exchange(self, reason: str) -> None:
        if self.attempt is not None:
            self.attempt.end(reason)

    def keep(self, result: Result) -> None:
        self.result = result

    async def stop(self, reason: str) -> None:
        """End the exchange, because the round ends in another way, and wait until nothing is being frozen.

        Calls of the stage must not overlap.
        """
        self.end_exchange(reason)
        if self._closing is not None:
            await self._closing.wait()

    async def reopen(self, reason: str, ballot: Ballot | None = None) -> None:
        """Go on training after a failed attempt. A prepared result is kept."""
        self.end_exchange(reason)
        if ballot is not None:
            self._context.events.write(
                Abort(round=self._group.round, attempt=ballot.attempt, leader=ballot.leader_id, reason=reason)
            )
        self.attempt = None
        if self._group.prepared is None:
            self.result = None
        if self._closing is None or self._closing.is_over:
            self._closing = None
            await self._member.reopen(self._group.round)
        # While freezing is not over, it goes on for the next attempt. If there is none when it ends, `_close` reopens
        # the round.

    async def step_back(self, reason: str, *, only: Ballot | None = None) -> None:
        """Go on training, because the leader may be gone. What is prepared is kept, so that the next leader finds it.

        Takes the lock itself.

        Args:
            only: do nothing unless this attempt is under way; None for any attempt.
        """
        async with self._lock:
            active = self._group.active
            if active is not None and only in (None, active):
                self._group.step_back()
                await self.reopen(reason, active)

    def let_go(self) -> None:
        """Drop the contribution, because applying a result takes memory."""
        self.attempt = None

    def end(self) -> None:
        self.attempt = self.result = self._closing = self._given = None
