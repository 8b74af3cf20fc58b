"""From a report to an attempt: what members report to their leader, what that adds up to, and whether the leader may
begin.

What the leader itself has of the round counts with the reports.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.place import Place
from swarm.averaging.reporter import Reporter
from swarm.averaging.roster import Roster
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import contact_of
from swarm.config import Quorum, RunConfig
from swarm.errors import NotReady
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress, RoundMember
from swarm.types import Block, PeerId

logger = logging.getLogger(__name__)


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
    _told_round: int = field(default=-1, init=False)
    _told_at: dict[PeerId, float] = field(default_factory=dict, init=False)
    """When this peer, in `_told_round`, last sent to each member what all members have committed."""
    _waits_for_quorum: bool = field(default=False, init=False)
    _led_since: float | None = field(default=-math.inf, init=False)
    """When this peer took the lead over; None while it does not lead. One that leads from its start need not wait."""

    # -- what members report -----------------------------------------------------------------------------------------

    async def answer(self, request: pb.ReportRequest) -> pb.ReportReply:
        """Take a report in and answer it. Raises NotReady while this peer catches up, and MalformedMessage."""
        if self.place.is_catching_up:
            # This peer neither leads nor takes part. A peer that takes it for the leader must look for another one.
            raise NotReady("this peer is catching up")
        # A sender that gets no answers from this peer does not count as a member, because it would only hold up
        # attempts.
        if not request.unanswered and self.roster.hear(request):
            self.context.changes.progressed()
        peer_id, standing = PeerId(request.sender.peer_id), self.place.standing
        theirs = messages.unpack_standing(request.standing)
        # A peer on another branch never leads here, and is not asked again. If it has come to this branch since, only
        # its reports say so.
        self.place.branches.reported(peer_id, theirs)
        if not self.place.branches.is_known(theirs) and self.place.leads is None:
            self.reporter.nudge(peer_id)
        reply = pb.ReportReply(
            standing=messages.pack_standing(standing), active=messages.pack_ballot(self.place.leads),
            outcome=self.place.outcomes.get(theirs.round), leader=self.leader_contact(),
            num_alive=len(self.roster.alive()), idle_leader_ids=self.roster.passed_over.told,
        )  # fmt: skip
        if theirs != standing:
            reply.past.extend(self.place.branches.told)
        elif self.context.config.rounds.synchronous and request.unanswered:
            reply.committed_gaps.extend(messages.pack_indices(self.member.progress().committed))
        elif self.context.config.rounds.synchronous:
            self._tell_of_microbatches(peer_id, reply)
        else:
            own = self.member.progress()
            reply.num_samples = own.num_samples if own.round == standing.round else 0
        return reply

    def _tell_of_microbatches(self, peer_id: PeerId, reply: pb.ReportReply) -> None:
        """If this peer leads, add to the reply what all members have committed: the next leader needs to know it."""
        view, now = self.view(), self.context.clock.monotonic()
        if not view.is_leader:
            return
        if view.round != self._told_round:
            self._told_round, self._told_at = view.round, {}
        # Sent only now and then, because a round may have thousands of microbatches, and each of them causes reports.
        heartbeat_seconds = self.context.timing.heartbeat_seconds
        if now - self._told_at.get(peer_id, -math.inf) >= heartbeat_seconds:
            latest = now - heartbeat_seconds
            self._told_at = {peer: at for peer, at in self._told_at.items() if at > latest} | {peer_id: now}
            reply.committed_gaps.extend(messages.pack_indices(self.member.progress().committed))
            reply.counted_gaps.extend(messages.pack_indices(view.counted))

    # -- what there is of the round ----------------------------------------------------------------------------------

    def view(self) -> GroupView:
        own, own_id, standing = self.member.progress(), self.context.own_id, self.place.standing
        is_own_round = own.round == standing.round
        progress = {own_id: own} if is_own_round and not self.roster.excludes_self else {}
        progress |= {peer: report.progress for peer, report in self.roster.members().items()}
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
            complete=self.may_end(standing, committed, num_samples, progress.keys()),
            highest_microbatch=max([own.highest_microbatch, *(p.highest_microbatch for p in progress.values())]),
            quiet_seconds=self.context.changes.quiet_seconds,
        )

    def overdue(self) -> Set[PeerId]:
        # A peer that stood still has received no reports in that time, and during an attempt nothing is added to a
        # round.
        is_of_use = not self.reporter.may_be_behind() and self.place.leads is None
        return self.roster.overdue() if is_of_use else frozenset()

    # -- who leads ---------------------------------------------------------------------------------------------------

    @property
    def leader_id(self) -> PeerId:
        """This peer while it leads an attempt; else, of the living peers that stand here or ahead, the one with the
        lowest id."""
        return self.context.own_id if self.place.leads else self.roster.leader()

    def leader_contact(self) -> pb.Contact:
        return contact_of(self.roster.contacts.record(self.leader_id) or self.context.present)

    # -- what may be done --------------------------------------------------------------------------------------------

    def may_begin(self) -> bool:
        """Whether this peer is to make an attempt now. The lead loop asks this after every change, and has
        `Round.attempt` make it. Its members are those in `view().progress`: this peer, and those that have reported
        lately from this very round and branch."""
        view, place = self.view(), self.place
        if not self._hears_all(view.is_leader) or self.reporter.may_be_behind() or place.group.active is not None:
            return False
        if place.branches.is_in_doubt:
            # This peer may have been left behind: then it would commit a second result of a round that is over.
            return False
        members = self.roster.members()
        is_unfinished = place.group.prepared is not None or any(report.prepared for report in members.values())
        # No attempt begins while a member is silent, because it would hold up the replays of that member's
        # microbatches.
        is_ready = view.complete and not self.overdue() and not self.roster.awaits_members()
        if not (is_unfinished or is_ready):
            return False
        is_present = self.has_quorum(view.progress.keys())
        if not is_present and not self._waits_for_quorum:
            logger.warning("round %d waits for a majority of the last round's members", view.round)
        self._waits_for_quorum = not is_present
        return is_present

    def _hears_all(self, is_leader: bool) -> bool:
        """Whether this peer leads, and did so for long enough that all members report to it.

        Members notice one after the other that the last leader is gone. With DiLoCo the first few of them may have the
        samples of a round. If they committed it, the others, who may be the most, would go on from where they are: on
        another branch. In a large stage a new leader does not even know whom it has yet to hear.
        """
        now = self.context.clock.monotonic()
        if not is_leader:
            self._led_since = None
            return False
        self._led_since = now if self._led_since is None else self._led_since
        has_time = now - self._led_since >= self.context.timing.takeover_seconds
        return has_time or self.context.config.rounds.synchronous or not self.roster.contacts.serving()

    def may_end(
        self, standing: Standing, committed: Collection[int], num_samples: int, present: Collection[PeerId]
    ) -> bool:
        """Whether the round is complete, or so late that it ends, with the peers that are present. `committed` are the
        microbatches that these peers have committed in the round, and `num_samples` is how many samples they have in
        it."""
        return is_complete(
            self.place.timeline.at(standing.round), self.context.own.block, standing.run_samples, committed,
            num_samples, absent_samples=self._absent_samples(present), is_late=partial(self._is_late, standing.round),
        )  # fmt: skip

    def is_whole(self, progress: Mapping[PeerId, Progress]) -> bool:
        """Whether these peers have all that this round needs, and may commit it. That the round is late does not count:
        only its leader can know that."""
        standing = self.place.standing
        here = {peer: each for peer, each in progress.items() if each.round == standing.round}
        committed = frozenset[int]().union(*(each.committed for each in here.values()))
        num_samples = sum(each.num_samples for each in here.values())
        config = self.place.timeline.at(standing.round)
        is_whole = is_complete(config, self.context.own.block, standing.run_samples, committed, num_samples)
        return is_whole and self.has_quorum(here.keys())

    def _absent_samples(self, present: Collection[PeerId]) -> int:
        """Samples of the round at living members, this peer included, that are not `present`.

        Zero in the synchronous setting, where the microbatches of an absent member are replayed.
        """
        if self.context.config.rounds.synchronous:
            return 0
        standing, own, own_id = self.place.standing, self.member.progress(), self.context.own_id
        others = self.roster.absent_samples(present)
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


def is_complete(
    config: RunConfig, block: Block, run_samples: int, committed: Collection[int], num_samples: int, *,
    absent_samples: int = 0, is_late: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Whether a group holds everything that a round needs.

    Synchronous: all its microbatches. DiLoCo: its number of samples. But a stage that lost samples with a peer ends its
    round early when it is late, or else it would stay behind the others for ever. A stage that shares a block with it
    cannot get ahead: it waits, and admits no more samples once it has enough for a round.

    With DiLoCo, a round that has its samples is not committed while the members that would be left out hold more
    samples of it than the others. A round that ends early leaves no living member out. Otherwise a newcomer with one
    inner step could commit a round without the member that has nearly all samples of it.

    Args:
        run_samples: the samples that the block had before this round.
        committed: microbatches of the members that would commit the round.
        num_samples: samples of the members that would commit the round.
        absent_samples: samples of the round at living members that would be left out.
        is_late: tells whether another stage is at a later round, or has waited long for this stage to decide. Called
            only when needed.
    """
    if config.rounds.synchronous:
        return all(index in committed for index in config.microbatches_after(run_samples, block))
    if num_samples >= config.round_samples_of(block):
        return num_samples >= absent_samples
    return absent_samples == 0 < num_samples and is_late()


def has_quorum(
    quorum: Quorum, present: Collection[str], *, last_members: Collection[str], announced: Callable[[], Collection[str]]
) -> bool:
    """Whether the peers that are present may commit a round.

    With a majority, two parts of a group cannot both commit the same round. The exception is a member that is started
    again: it forgets what it had prepared, and may join the majority for another result of that round.

    Args:
        last_members: the members of the last round; empty for a peer that knows of none. If a majority is wanted, most
            of them must be present.
        announced: gives all peers of the stage in the directory, including this one. Called only if no last round is
            known.
    """
    match quorum:
        case "available":
            return True
        case "majority":
            electorate = set(last_members or announced())
            return 2 * len(electorate & set(present)) > len(electorate)
        case other:
            assert_never(other)
