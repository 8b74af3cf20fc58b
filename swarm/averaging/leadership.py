"""Who leads a round: the attempts that this peer leads, and how a leader that does not do its work is passed over.

What a leader says proves nothing, so where a round grows old each member asks the others what they have of it. If that
is a whole round, and the leader neither begins nor commits it, the member says so to all that ask. Whom most of them
name leads no more. Ballots keep the round safe meanwhile: even of two leaders only one can commit it.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass, field

from swarm.averaging.agreement.blame import AttemptFailed
from swarm.averaging.agreement.messages import Ballot
from swarm.averaging.agreement.pace import Tenure
from swarm.averaging.agreement.place import Place
from swarm.averaging.barrier import Barrier
from swarm.averaging.own_round import OwnRound
from swarm.averaging.reporter import Reporter, Survey
from swarm.averaging.roster import MOST_ASKED, Roster
from swarm.averaging.round import Round
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.errors import SwarmError
from swarm.machine.clock import wait
from swarm.training.round_member import RoundMember
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MOST_AHEAD = 1000
"""The most by which an attempt's number follows what a member says it has promised. Numbers are bounded, and one that
is used cannot be undone."""
MOST_REASONS, OTHERWISE = 64, "for other reasons"
"""The reasons of failed attempts that are counted by themselves, and what all others count as. They have names, times
and members' words in them, and travel with every answer to Describe."""
_REST_PER_LOOK = 4.0
"""The pause between two looks at the round, as a multiple of the time that a look takes. It leaves time for other work
of the event loop."""


@dataclass(eq=False)
class LeadLoop:
    context: Context
    place: Place
    roster: Roster
    own_round: OwnRound
    reporter: Reporter
    watch: RoundWatch
    round: Round
    num_attempts: int = field(default=0, init=False)
    aborted: Counter[str] = field(default_factory=Counter, init=False)
    """The number of failed attempts, by reason."""
    _attempts: Counter[int] = field(default_factory=Counter, init=False)
    """The number of the last attempt, by round."""

    async def run(self) -> None:
        """Lead whenever it is this peer's turn, until cancelled. After a cancellation, members do not know how a
        running attempt ends."""
        clock, timing = self.context.clock, self.context.timing
        backoff_seconds = 0.0
        await wait(self.context.changes.next, timing.heartbeat_seconds)
        while True:
            changed, looked_at = self.context.changes.next, clock.monotonic()
            if not self.watch.may_begin():
                # In a large group reports come faster than the round can be looked at.
                rest_seconds = _REST_PER_LOOK * (clock.monotonic() - looked_at)
                await clock.sleep(min(timing.heartbeat_seconds, rest_seconds))
                await wait(changed, timing.heartbeat_seconds)
            elif await self._attempt():
                backoff_seconds = 0.0
            else:
                await clock.sleep(backoff_seconds)
                backoff_seconds = min(timing.max_retry_seconds, max(timing.retry_seconds, 2 * backoff_seconds))

    async def _attempt(self) -> bool:
        standing, promised = self.place.standing, self.place.group.promised
        number = max(self._attempts[standing.round], promised.attempt if promised else 0) + 1
        self._attempts = Counter({standing.round: number})
        self.num_attempts += 1
        ballot = Ballot(number, self.context.own_id)
        members = self.roster.contacts.records(self.watch.view().progress)
        if not self.roster.excludes_self:
            members[self.context.own_id] = self.context.present
        try:
            await self.round.attempt(members, standing, number)
            # The result may be decided, though it was not committed here. Then the next attempt finishes it.
            await self.own_round.step_back("it was decided, and not committed here", only=ballot)
            if self.place.standing != standing:
                for peer_id in members.keys() - set(self.place.last_members):
                    self.roster.suspicions.failed(peer_id)
        except AttemptFailed as failed:
            logger.info("attempt %d at round %d failed: %s", number, standing.round, failed)
            reason = str(failed)
            self.aborted[reason if reason in self.aborted or len(self.aborted) < MOST_REASONS else OTHERWISE] += 1
            # A member's promise is no more than its word, and numbers have a bound.
            self._attempts[standing.round] = max(number, min(failed.promised_attempt, number + MOST_AHEAD))
            await self._learn_from(failed)
            return False
        except SwarmError as error:
            # For example, no peer of another stage sends its average of tied parameters. That stage may still decide
            # anew.
            logger.warning("round %d cannot be committed yet: %s", standing.round, error)
            await self.own_round.step_back("what it takes to commit cannot be had", only=ballot)
            return False
        finally:
            self.context.changes.notify()
        return self.place.standing != standing

    async def _learn_from(self, failed: AttemptFailed) -> None:
        for peer_id in failed.unreachable:
            self.roster.suspect(peer_id)
        for peer_id in failed.excluded:
            self.roster.suspicions.exclude(peer_id)
        for peer in self.own_round.exchanges.suspects.out_of(self.place.standing.round):
            self.roster.suspicions.leave_out(PeerId(peer))
        for peer_id in failed.refused:
            self.roster.forget_report(peer_id)
        self.context.changes.signal()
        if failed.refused:
            # Peers that refused may be at a later round. If this peer did not ask, it would go on alone.
            await self.reporter.ask_all()


@dataclass(eq=False)
class Succession:
    context: Context
    place: Place
    member: RoundMember
    roster: Roster
    survey: Survey
    own_round: OwnRound
    barrier: Barrier
    watch: RoundWatch
    _tenure: Tenure = field(init=False)
    _looked_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._tenure = Tenure(self.context.timing)

    async def run(self) -> None:
        """Look and judge until cancelled."""
        timing = self.context.timing
        while True:
            await self.context.clock.sleep(timing.heartbeat_seconds)
            now = self.context.clock.monotonic()
            # In a large group each member looks less often.
            pause_seconds = timing.look_seconds * max(1.0, len(self.roster.alive()) / MOST_ASKED)
            if self.roster.round_seconds >= timing.idle_seconds and now - self._looked_at >= pause_seconds:
                self._looked_at = now
                await self._look()
            for peer_id in sorted(self.roster.judge()):
                await self._pass_over(peer_id)

    async def _look(self) -> None:
        standing, group = self.place.standing, self.place.group
        told = await self.survey.look()
        leader_id, own = self.watch.leader_id, self.member.progress()
        if self.place.standing != standing or self.watch.reporter.may_be_behind():
            return
        if leader_id == self.context.own_id or not self.watch.is_whole(told | {self.context.own_id: own}):
            self._tenure.restart()
            return
        idleness = self._tenure.idleness(
            standing, leader_id, group.promised, num_bytes=self.member.activity().num_bytes,
            now=self.context.clock.monotonic(),
        )  # fmt: skip
        if not idleness:
            return
        if group.prepared is not None and not await self.barrier.is_passed(standing.round):
            self._tenure.restart()
        elif self.place.standing == standing:
            logger.warning("round %d is whole, and stands still under %s: %s", standing.round, leader_id, idleness)
            self.roster.passed_over.see(leader_id)

    async def _pass_over(self, peer_id: PeerId) -> None:
        logger.warning(
            "%s does not lead any more, because most say that a whole round stood still under it: %s leads",
            peer_id, self.watch.leader_id,
        )  # fmt: skip
        active = self.place.group.active
        if active is not None and active.leader_id == peer_id:
            await self.own_round.step_back("its leader is passed over", only=active)
        self.context.changes.signal()
        self.context.changes.report_again()
