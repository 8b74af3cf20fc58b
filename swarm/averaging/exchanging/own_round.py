"""One member's work in its round: the contribution that it freezes, the attempt, and the attempt's result.

Used by exchanging/participant, which obeys a leader, and by catching_up/advance, which ends the round. There is at most
one of each, and none outlives the round. Never decides anything about a round.
"""

import asyncio
import logging
import math
from dataclasses import dataclass

from swarm.averaging.context import Context
from swarm.averaging.exchanging.attempt import Attempt
from swarm.averaging.exchanging.exchange import Closed, Exchanges
from swarm.averaging.exchanging.feedback import Residual
from swarm.averaging.leading.group import Ballot
from swarm.averaging.place import Place
from swarm.events.kinds import Abort
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundMember, RoundResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished exchange's result, applied or not.

    Attributes:
        residual: what error feedback keeps once the result is applied.
        fragment: which part of the member's parameters the result is about.
        began_at: when the contribution began to be frozen, by the member's clock.
    """

    prepared: pb.Prepared
    round_result: RoundResult
    residual: Residual
    fragment: int
    began_at: float


class Closing:
    """A contribution that is being frozen, or is frozen, for any attempt that needs it.

    For a stage of several GB, or on a machine whose tasks take ten seconds, freezing takes longer than a call may. So
    it goes on after the call that started it, and the next call joins it.

    Attributes:
        drop: microbatches that are taken out of the contribution.
        began_at: when freezing began, by the member's clock.
    """

    def __init__(self, *, drop: frozenset[int], began_at: float) -> None:
        self.drop = drop
        self.began_at = began_at
        self._outcome: asyncio.Future[Closed | Exception] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether freezing has ended, with a contribution or with an error."""
        return self._outcome.done()

    def end(self, outcome: Closed | Exception) -> None:
        """Note the frozen contribution, or the error of freezing it."""
        self._outcome.set_result(outcome)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until freezing is over, but no longer than `seconds`. Returns whether it is."""
        await asyncio.wait([self._outcome], timeout=seconds)
        return self.is_over

    @property
    def closed(self) -> Closed:
        """The frozen contribution, once freezing is over. Raises the error of freezing it."""
        outcome = self._outcome.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class OwnRound:
    """One member's work in the round at which it stands. Callers hold the place's lock unless a method says otherwise.

    Attributes:
        exchanges: closes contributions and exchanges them.
        attempt: the attempt for which this member's contribution is closed.
        result: the result of this attempt. Or that of an earlier attempt, if it may have been decided.
    """

    def __init__(self, context: Context, place: Place, member: RoundMember) -> None:
        self._context = context
        self._lock = place.lock
        self._group = place.group
        self._member = member
        self.exchanges = Exchanges(context.config.averaging, context.own_id)
        self._closing: Closing | None = None
        """The contribution that is being frozen, or is frozen; None once the round is reopened or over. Freezing needs
        no lock."""
        self.attempt: Attempt | None = None
        self.result: Result | None = None

    def close(self, drop: frozenset[int]) -> Closing:
        """Freeze the contribution, or join what an earlier attempt began to freeze with the same `drop`."""
        before = self._closing
        if before is None or before.drop != drop:
            self._closing = Closing(drop=drop, began_at=self._context.clock.monotonic())
            self._context.tasks.spawn(self._close(self._closing, before))
            return self._closing
        return before

    async def _close(self, closing: Closing, before: Closing | None) -> None:
        if before is not None:
            await before.wait()
        failed = False
        try:
            contribution = await self._member.close(self._group.round, drop=closing.drop)
            closing.end(await self.exchanges.close(contribution))
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
        self.attempt = Attempt(
            self._context, self.exchanges, ballot=ballot, closed=closing.closed, began_at=closing.began_at
        )
        return True

    def end_exchange(self, reason: str) -> None:
        """Give this member's exchange up, if there is one under way."""
        if self.attempt is not None:
            self.attempt.end(reason)

    def keep(self, result: Result) -> None:
        """Keep the result of an exchange that succeeded."""
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
        """Forget the round, because the member stands elsewhere now."""
        self.attempt = self.result = self._closing = None
