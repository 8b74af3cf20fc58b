"""This peer's view of its group's round: what the members have of it, whether that is all of it, and who may commit it.

It combines the reports of peers with this peer's own progress. Changes nothing.
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from functools import partial

from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.place import Place
from swarm.averaging.agreement.rules import has_quorum, is_complete
from swarm.averaging.reporter import Reporter
from swarm.averaging.roster import Roster
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import contact_of
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress, RoundMember
from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """This peer's knowledge of its group's round. The leader knows all of it, any other peer only its own part.

    Attributes:
        microbatches: those that a synchronous round consists of; none with DiLoCo.
        progress: the progress of each member, this peer included.
        committed: microbatches that some member has committed in this round.
        shown: `committed`, without the microbatches of members that have missed a heartbeat.
        counted: `committed`, and the microbatches that were committed by members that are gone or left out.
        lost: the microbatches that were certainly lost with a member.
        complete: whether the members hold all that the round needs.
        highest_microbatch: the highest index that any member has seen; -1 for none.
        quiet_seconds: the time since any of this last changed.
    """

    round: int
    microbatches: Collection[int]
    leader_id: PeerId
    is_leader: bool
    progress: Mapping[PeerId, Progress]
    committed: frozenset[int]
    shown: frozenset[int]
    counted: frozenset[int]
    lost: frozenset[int]
    complete: bool
    highest_microbatch: int
    quiet_seconds: float


@dataclass(eq=False)
class RoundWatch:
    context: Context
    place: Place
    member: RoundMember
    roster: Roster
    reporter: Reporter

    # -- what there is of the round ----------------------------------------------------------------------------------

    def view(self) -> GroupView:
        own, own_id, standing = self.member.progress(), self.context.own_id, self.place.standing
        is_own_round = own.round == standing.round
        progress = {own_id: own} if is_own_round and not self.roster.excludes_self else {}
        progress |= {peer: report.progress for peer, report in self.roster.members(standing).items()}
        overdue = self.overdue()
        committed = frozenset[int]().union(*(p.committed for p in progress.values()))
        shown = frozenset[int]().union(*(p.committed for peer, p in progress.items() if peer not in overdue))
        num_samples = sum(p.num_samples for p in progress.values())
        decision, is_synchronous = self.place.decision, self.context.config.rounds.synchronous
        microbatches = self.roster.microbatches_at(standing) if is_synchronous else ()
        if decision is not None and decision.round == standing.round:
            # A decided result holds all microbatches of the round, even if a member has left since.
            committed = shown = committed | frozenset(microbatches)
        leader_id = self.leader_id
        return GroupView(
            round=standing.round,
            microbatches=microbatches,
            leader_id=leader_id,
            is_leader=leader_id == own_id,
            progress=progress,
            committed=committed,
            shown=shown,
            # This peer's microbatches count even while it is left out, because it may come back before the round ends.
            counted=self.roster.reports.counted | committed | (own.committed if is_own_round else frozenset()),
            lost=self.roster.reports.lost - committed,
            complete=self.is_complete(standing, committed, num_samples, progress.keys()),
            highest_microbatch=max([own.highest_microbatch, *(p.highest_microbatch for p in progress.values())]),
            quiet_seconds=self.context.changes.quiet_seconds,
        )

    def overdue(self) -> Set[PeerId]:
        # A peer that stood still has received no reports in that time, and during an attempt nothing is added to a
        # round.
        is_of_use = not self.reporter.may_be_behind and self.place.leads is None
        return self.roster.overdue(self.place.standing) if is_of_use else frozenset()

    # -- who leads ---------------------------------------------------------------------------------------------------

    @property
    def leader_id(self) -> PeerId:
        return self.context.own_id if self.place.leads else self.roster.leader(self.place.standing)

    def leader_contact(self) -> pb.Contact:
        return contact_of(self.roster.contacts.record(self.leader_id) or self.context.present)

    # -- what may be done --------------------------------------------------------------------------------------------

    def is_complete(
        self, standing: Standing, committed: Collection[int], num_samples: int, present: Collection[PeerId]
    ) -> bool:
        """Whether the peers that are present hold all that a round needs; see rules.is_complete. `committed` are the
        microbatches that these peers have committed in the round, and `num_samples` is how many samples they have in
        it."""
        return is_complete(
            self.place.timeline.at(standing.round), self.context.own.block, standing.run_samples, committed,
            num_samples, absent_samples=self._absent_samples(present), is_late=partial(self._is_late, standing.round),
        )  # fmt: skip

    def _absent_samples(self, present: Collection[PeerId]) -> int:
        """Samples of the round at living members, this peer included, that are not `present`.

        Zero in the synchronous setting, where the microbatches of an absent member are replayed.
        """
        if self.context.config.rounds.synchronous:
            return 0
        standing, own, own_id = self.place.standing, self.member.progress(), self.context.own_id
        others = self.roster.absent_samples(standing, present)
        if own_id in present or own.round != standing.round or self.roster.suspicions.has_failed_for_good(own_id):
            return others
        return others + own.num_samples

    def _is_late(self, round_number: int) -> bool:
        since = self.place.awaited_since if round_number == self.place.standing.round else None
        timing, now = self.context.timing, self.context.clock.monotonic()
        if since is not None and now - since >= timing.awaited_seconds:
            return True
        theirs = self.context.other_blocks.latest
        return theirs > round_number and self.place.branches.is_at_pace(theirs)

    def has_quorum(self, present: Collection[str]) -> bool:
        return has_quorum(
            self.context.config.averaging.quorum,
            present,
            last_members=self.place.last_members,
            announced=lambda: {self.context.own_id, *self.roster.contacts.serving()},
        )
