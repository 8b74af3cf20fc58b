"""Watches the round whenever this peer leads, and has its leader try to commit it.

Run by averaging/averager. From the second failed attempt in a row on, it waits before it tries again, longer each time.
The leader (leading/leader) carries the attempt out.
"""

import logging
from collections import Counter

from swarm.averaging.context import Context, wait
from swarm.averaging.exchanging.own_round import OwnRound
from swarm.averaging.leading.blame import AttemptFailed
from swarm.averaging.leading.group import Ballot
from swarm.averaging.leading.leader import Leader
from swarm.averaging.leading.watch import RoundWatch
from swarm.averaging.members.reporter import Reporter
from swarm.averaging.members.roster import Roster
from swarm.averaging.place import Place
from swarm.errors import SwarmError

logger = logging.getLogger(__name__)

_REST_PER_LOOK = 4.0
"""Seconds between two looks at the round for each second that a look takes, to leave time for other work of the event
loop."""


class LeadLoop:
    """The attempts that one peer leads."""

    def __init__(
        self,
        context: Context,
        place: Place,
        roster: Roster,
        own_round: OwnRound,
        reporter: Reporter,
        watch: RoundWatch,
        leader: Leader,
    ) -> None:
        self._context = context
        self._place = place
        self._roster = roster
        self._own_round = own_round
        self._reporter = reporter
        self._watch = watch
        self._leader = leader
        self._attempts: Counter[int] = Counter()
        """The number of the last attempt, by round."""
        self.num_attempts = 0
        self.aborted: Counter[str] = Counter()
        """Attempts that came to nothing, by the reason."""

    async def run(self) -> None:
        """Lead whenever it is this peer's turn, until cancelled. Cancellation leaves the members in doubt."""
        clock, timing = self._context.clock, self._context.timing
        num_failures = 0
        await wait(self._context.changes.next, timing.heartbeat_seconds)
        while True:
            changed, looked_at = self._context.changes.next, clock.monotonic()
            if not self._watch.may_begin():
                # A large group's reports come faster than all of them can be looked at.
                rest_seconds = _REST_PER_LOOK * (clock.monotonic() - looked_at)
                await clock.sleep(min(timing.heartbeat_seconds, rest_seconds))
                await wait(changed, timing.heartbeat_seconds)
            elif await self._attempt():
                num_failures = 0
            else:
                num_failures += 1
                backoff = timing.retry_seconds * 2 ** (num_failures - 2) if num_failures > 1 else 0.0
                await clock.sleep(min(timing.max_retry_seconds, backoff))

    async def _attempt(self) -> bool:
        """Try to commit the round. Returns whether this peer has moved on."""
        standing, promised = self._place.standing, self._place.group.promised
        number = max(self._attempts[standing.round], promised.attempt if promised else 0) + 1
        self._attempts = Counter({standing.round: number})
        self.num_attempts += 1
        ballot = Ballot(number, self._context.own_id)
        members = self._roster.contacts.records(self._watch.view().progress)
        if not self._roster.excludes_self:
            members[self._context.own_id] = self._context.present
        try:
            await self._leader.attempt(members, standing, number)
            # A result may be decided and not be committed here: the next attempt finishes what is prepared.
            await self._own_round.step_back("it was decided, and not committed here", only=ballot)
            if self._place.standing != standing:
                for peer_id in members.keys() - set(self._place.last_members):
                    self._roster.suspicions.failed(peer_id)
        except AttemptFailed as failed:
            logger.info("attempt %d at round %d failed: %s", number, standing.round, failed)
            self.aborted[str(failed)] += 1
            self._attempts[standing.round] = max(number, failed.promised_attempt)
            await self._learn_from(failed)
            return False
        except SwarmError as error:
            # For example, no holder of another stage's average of a shared block answers; that stage may decide anew.
            logger.warning("round %d cannot be committed yet: %s", standing.round, error)
            await self._own_round.step_back("what it takes to commit cannot be had", only=ballot)
            return False
        finally:
            self._context.changes.notify()
        return self._place.standing != standing

    async def _learn_from(self, failed: AttemptFailed) -> None:
        for peer_id in failed.unreachable:
            self._roster.suspect(peer_id)
        for peer_id in failed.excluded:
            self._roster.suspicions.exclude(peer_id)
        for peer_id in failed.refused:
            self._roster.forget_report(peer_id)
        self._context.changes.signal()
        if failed.refused:
            # Those that refused may be at a later round: without asking, this peer would go on alone.
            await self._reporter.ask_all()
