"""What one member has under way in its round: the contribution that it freezes, the attempt, and the attempt's result.

Used by exchanging/participant, which does what a leader says, and by catching_up/advance, which ends the round. All of
it is of this round alone, and only one of each exists. Never decides anything about a round.
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
        residual: what error feedback keeps once it is applied.
        fragment: which part of the member's parameters it is about.
        began_at: when the contribution began to be frozen, by the member's clock.
    """

    prepared: pb.Prepared
    round_result: RoundResult
    residual: Residual
    fragment: int
    began_at: float


class Closing:
    """A contribution that is being frozen, or is frozen, for whichever attempt comes to want it.

    Of a stage of several GB, or on a machine whose tasks take ten seconds, to freeze takes longer than any call: so it
    outlives the call that asked for it, and the next one joins it.

    Attributes:
        drop: microbatches that are taken out of it.
        began_at: when it began, by the member's clock.
    """

    def __init__(self, *, drop: frozenset[int], began_at: float) -> None:
        self.drop = drop
        self.began_at = began_at
        self._outcome: asyncio.Future[Closed | Exception] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether it is frozen, or could not be."""
        return self._outcome.done()

    def end(self, outcome: Closed | Exception) -> None:
        """End the reading, once the contribution is frozen or could not be."""
        self._outcome.set_result(outcome)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, but no longer than that; says whether it is."""
        await asyncio.wait([self._outcome], timeout=seconds)
        return self.is_over

    @property
    def closed(self) -> Closed:
        """What was frozen; once it is over. Raises what freezing it failed with."""
        outcome = self._outcome.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class OwnRound:
    """One member's work in the round at which it stands. Its callers hold the place's lock unless it says otherwise.

    Attributes:
        exchanges: how what this member contributes travels.
        attempt: the one for which this member is closed.
        result: of this attempt, or of an earlier one if that may have been decided.
    """

    def __init__(self, context: Context, place: Place, member: RoundMember) -> None:
        self._context = context
        self._lock = place.lock
        self._group = place.group
        self._member = member
        self.exchanges = Exchanges(context.config.averaging, context.own_id)
        self._closing: Closing | None = None
        """Since it was begun, until the round is opened again; it may go on while the lock is free."""
        self.attempt: Attempt | None = None
        self.result: Result | None = None

    def close(self, drop: frozenset[int]) -> Closing:
        """Freeze the contribution: joins what an earlier attempt has begun, or has frozen, if it is the same."""
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
        except Exception as error:  # noqa: BLE001 - it belongs to the attempts that wait for it
            logger.warning("the contribution could not be closed: %s", error)
            closing.end(error)
            failed = True
        async with self._lock:
            if closing is self._closing and (failed or self._group.active is None):
                # It failed, or no attempt is active any more: nothing will use the contribution.
                await self._member.reopen(self._group.round)
                self._closing = None

    def closing_report(self) -> pb.Closing:
        """How far freezing the contribution is. Needs no lock."""
        activity, now = self._member.activity(), self._context.clock.monotonic()
        waited_seconds = now - self._closing.began_at if self._closing is not None else math.inf
        copying_seconds = activity.num_bytes / self._context.timing.work_bytes_per_second
        return pb.Closing(
            quiet_seconds=min(activity.quiet_seconds, waited_seconds),
            expected_seconds=max(activity.longest_seconds, copying_seconds),
        )

    def begin(self, ballot: Ballot, closing: Closing) -> bool:
        """Begin an attempt with what was frozen for it; False if it was given up, or another closing took its place."""
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
        """The exchange has come to its end."""
        self.result = result

    async def stop(self, reason: str) -> None:
        """The round ends otherwise: wait until nothing is being frozen, for calls of the stage never overlap."""
        self.end_exchange(reason)
        if self._closing is not None:
            await self._closing.wait()

    async def reopen(self, reason: str, ballot: Ballot | None = None) -> None:
        """The attempt came to nothing: go on training. What is prepared is kept."""
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
        # Else it goes on, for the next attempt; if there is none by its end, the round is opened then.

    async def step_back(self, reason: str, *, only: Ballot | None = None) -> None:
        """Go on training, in doubt about the leader, but keep what is prepared for the next leader to find.

        Takes the lock itself.

        Args:
            only: step back from this attempt alone; None for whatever attempt is under way.
        """
        async with self._lock:
            active = self._group.active
            if active is not None and only in (None, active):
                self._group.step_back()
                await self.reopen(reason, active)

    def let_go(self) -> None:
        """What this member brought is not needed any more: applying a result takes memory."""
        self.attempt = None

    def end(self) -> None:
        """The member stands elsewhere now."""
        self.attempt = self.result = self._closing = None
