"""How a leader that does not do its work is passed over: members look at a round that grows old, and name its leader.

What a leader says proves nothing, so each member asks the others what they have of the round. If that is a whole round,
and the leader neither begins nor commits it, the member says so to all that ask. Whom most of them name leads no more.
Ballots keep the round safe meanwhile: even of two leaders only one can commit it.
"""

import logging
import math
from dataclasses import dataclass, field

from swarm.averaging.agreement.pace import Tenure
from swarm.averaging.agreement.place import Place
from swarm.averaging.agreement.rules import is_complete
from swarm.averaging.barrier import Barrier
from swarm.averaging.own_round import OwnRound
from swarm.averaging.roster import MOST_ASKED, Roster
from swarm.averaging.survey import Survey
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.training.round_member import Progress, RoundMember
from swarm.types import PeerId

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Succession:
    """One member's judgement of its leader."""

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
            for peer_id in sorted(self.roster.judge(self.place.standing)):
                await self._pass_over(peer_id)

    async def _look(self) -> None:
        standing, group = self.place.standing, self.place.group
        told = await self.survey.look()
        leader_id, own = self.watch.leader_id, self.member.progress()
        if self.place.standing != standing or self.watch.reporter.may_be_behind:
            return
        if leader_id == self.context.own_id or not self._is_whole(told | {self.context.own_id: own}):
            self._tenure.restart()
            return
        idleness = self._tenure.idleness(
            standing,
            leader_id,
            group.promised,
            num_bytes=self.member.activity().num_bytes,
            now=self.context.clock.monotonic(),
        )
        if not idleness:
            return
        if group.prepared is not None and not await self.barrier.is_passed(standing.round):
            self._tenure.restart()
        elif self.place.standing == standing:
            logger.warning("round %d is whole, and stands still under %s: %s", standing.round, leader_id, idleness)
            self.roster.passed_over.see(leader_id)

    def _is_whole(self, told: dict[PeerId, Progress]) -> bool:
        number = self.place.standing.round
        here = {peer: progress for peer, progress in told.items() if progress.round == number}
        committed = frozenset[int]().union(*(progress.committed for progress in here.values()))
        num_samples = sum(progress.num_samples for progress in here.values())
        is_whole = is_complete(self.context.config, self.context.own.block, number, committed, num_samples)
        return is_whole and self.watch.has_quorum(here.keys())

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
