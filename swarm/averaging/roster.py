"""Which peers are in the group, and which are candidates for its leader, as one peer sees it: reports and suspicions.

It uses the directory's last view and the peers' own messages, so the group goes on when the directory is out of reach.
Pure but for its clock.
"""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterable, Set
from functools import partial
from typing import TypeVar

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.place import Place
from swarm.averaging.agreement.reports import PassedOver, Report, RoundReports, Suspicions
from swarm.averaging.agreement.shares import most_samples
from swarm.averaging.wire.context import Contacts, Context
from swarm.averaging.wire.transport import record_of
from swarm.config import Timeline
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress
from swarm.types import Block, PeerId, PeerRecord

MOST_ASKED = 32
"""The most peers that are asked for their standing at once."""

_Id = TypeVar("_Id", bound=str)


def leader_of(peer_ids: Iterable[_Id]) -> _Id:
    """The leader of these peers of a stage: the one with the lowest id. There must be one at least.

    `Roster.leader` says which peers these are. Another rule must be the same at all peers of a run.
    """
    return min(peer_ids)


def _microbatches_at(timeline: Timeline, block: Block, standing: Standing) -> Collection[int]:
    return timeline.at(standing.round).microbatches_after(standing.run_samples, block)


class Roster:
    """The peers of one stage.

    Attributes:
        contacts: their addresses.
        reports: what they have reported about the round.
        suspicions: the peers that are suspected, or left out.
        passed_over: the peers that do not lead any more.
    """

    def __init__(self, context: Context, place: Place) -> None:
        config, block = context.config, context.own.block
        self.contacts = Contacts(context)
        # It must not refer to the roster: the cycle would keep the peer's state until Python collects cycles.
        self.microbatches_at = partial(_microbatches_at, place.timeline, block)
        """Synchronous: gives the microbatches of the round at which a peer stands."""
        self.reports = RoundReports(self.microbatches_at if config.rounds.synchronous else None)
        self._place, self._block = place, block
        self.suspicions = Suspicions(context.clock, context.timing)
        self.passed_over = PassedOver(context.own_id)
        self._own_id = context.own_id
        self._clock = context.clock
        self._timing = context.timing
        self._branches_yield = not config.averaging.needs_majority
        self._standings: dict[PeerId, Standing] = {}
        self._answered_at: dict[PeerId, float] = {}
        """When each peer gave its last sign of life."""
        self._moved_at = context.clock.monotonic()

    # -- news --------------------------------------------------------------------------------------------------------

    def learn(self, contact: pb.Contact) -> PeerRecord:
        """Remember a peer's address, and return the peer's record. Raises MalformedMessage for a wrong contact."""
        record = record_of(contact, self._block)
        if self.contacts.add(record):
            self._forget_unknown()
        return record

    def hear(self, request: pb.ReportRequest) -> bool:
        """Note a report. Returns whether it holds anything new. Raises MalformedMessage if it makes no sense."""
        standing, prepared = messages.unpack_standing(request.standing), messages.unpack_ballot(request.prepared)
        peer_id = PeerId(self.learn(request.sender).peer_id)
        progress = self.progress(standing, request, request.highest_microbatch)
        previous = self.reports.current.get(peer_id)
        report = Report(progress=progress, prepared=prepared, heard_at=self._clock.monotonic())
        self.reports.current[peer_id] = report
        self.reports.hear(peer_id, report)
        self.answered(peer_id, report.standing)
        return previous is None or dataclasses.replace(previous, heard_at=report.heard_at) != report

    def answered(self, peer_id: PeerId, standing: Standing | None) -> None:
        """Note a peer's sign of life, and where it stands; `standing` is None while the peer is about to move."""
        self.suspicions.answered(peer_id)
        self._answered_at[peer_id] = self._clock.monotonic()
        self.contacts.answered(peer_id)
        if standing is not None:
            self._standings[peer_id] = standing

    def heard_of_round(self, peer_id: PeerId, standing: Standing, reply: pb.ReportReply) -> None:
        """Note what a peer's answer says about the round. A leader's answer names the microbatches of all members,
        since any may lead next."""
        progress = self.progress(standing, reply, -1)
        self.reports.count(self.reports.named(standing, reply.counted_gaps))
        self.reports.hear(peer_id, Report(progress=progress, prepared=None, heard_at=self._clock.monotonic()))

    def progress(
        self, standing: Standing, told: pb.ReportRequest | pb.ReportReply, highest_microbatch: int
    ) -> Progress:
        """The progress of a peer at `standing`, read from its report or answer."""
        return Progress(
            round=standing.round,
            lineage=standing.lineage,
            run_samples=standing.run_samples,
            num_samples=min(told.num_samples, most_samples(self._place.timeline.at(standing.round), self._block)),
            committed=self.reports.named(standing, told.committed_gaps),
            highest_microbatch=highest_microbatch,
        )

    def suspect(self, peer_id: PeerId, *, is_gone: bool = False) -> None:
        """Note that a call to a peer failed: the peer neither leads nor takes part until it gives a sign of life.
        `is_gone` says whether no process listens at the peer's endpoint, so that what it had committed in this round is
        lost."""
        self.suspicions.suspect(peer_id)
        self.reports.current.pop(peer_id, None)
        if is_gone:
            self.reports.lose(peer_id)
        self._standings.pop(peer_id, None)

    def forget_report(self, peer_id: PeerId) -> None:
        """Forget what a peer reported, because it turned out to be out of date."""
        self.reports.current.pop(peer_id, None)

    def forget(self) -> None:
        """Forget all reports and suspicions, because this process stood still and has to ask all others again."""
        self.suspicions.suspect_none()
        self.reports.current.clear()

    def moved(self) -> None:
        """Begin a new round, and forget the standings of peers at earlier ones."""
        own = self._place.standing
        self.suspicions.begin_round(self._place.last_members)
        self._moved_at = self._clock.monotonic()
        self.reports.begin_round()
        self._standings = {peer: theirs for peer, theirs in self._standings.items() if not self.is_ahead(own, theirs)}
        self.contacts.forget_the_gone()
        self._forget_unknown()

    def _forget_unknown(self) -> None:
        known = self.contacts.all().keys()
        self.reports.forget_others(known)
        self.suspicions.forget_others(known)
        self.passed_over.forget_others(known)
        for by_peer in (self._standings, self._answered_at):
            for peer_id in by_peer.keys() - known:
                del by_peer[peer_id]

    @property
    def num_remembered(self) -> int:
        """The number of peers about which anything is noted. It is bounded, even if peers send made-up reports."""
        noted = (self.reports.current, self.reports.last, self._standings, self._answered_at)
        return len(self.contacts.all().keys() | self.suspicions.suspected | set[PeerId]().union(*noted))

    # -- questions ---------------------------------------------------------------------------------------------------

    def is_ahead(self, one: Standing, other: Standing) -> bool:
        """Whether a peer that stands at `other` should go to `one`."""
        return one > other if self._branches_yield else one.round > other.round

    def leader(self) -> PeerId:
        """The leader of the peers that serve, are not suspected, and stand at the same place as this peer or ahead of
        it.

        This peer is one of them, unless another one is ahead of it. A peer on another branch is never one of them, and
        one that is passed over is none either.
        """
        there, ahead = self._beside()
        candidates = (there | ahead) - self.passed_over.peers
        if not ahead and self._own_id not in self.passed_over.peers:
            candidates.add(self._own_id)
        return leader_of(candidates or {self._own_id})

    def _beside(self) -> tuple[set[PeerId], set[PeerId]]:
        """The other peers that serve and are not suspected, at this peer's place and ahead of it."""
        own, is_elsewhere = self._place.standing, self._place.branches.is_elsewhere
        there, ahead = set[PeerId](), set[PeerId]()
        for peer_id in self.contacts.serving():
            standing = self._standings.get(peer_id, own)
            if peer_id in self.suspicions.suspected or is_elsewhere(peer_id):
                continue
            if self.is_ahead(standing, own):
                ahead.add(peer_id)
            elif standing == own:
                there.add(peer_id)
        return there, ahead

    def judge(self) -> set[PeerId]:
        return self.passed_over.judge(self._beside()[0])

    @property
    def round_seconds(self) -> float:
        return self._clock.monotonic() - self._moved_at

    def members(self) -> dict[PeerId, Report]:
        """Other peers that reported lately, from the same round of the same branch."""
        own = self._place.standing
        oldest = self._clock.monotonic() - self._timing.fresh_seconds
        return {
            peer_id: report
            for peer_id, report in self.reports.current.items()
            if report.heard_at >= oldest and report.standing == own and not self.suspicions.is_excluded(peer_id)
        }

    def overdue(self) -> Set[PeerId]:
        """Members that have missed a heartbeat, perhaps because they were just frozen or cut off."""
        oldest = self._clock.monotonic() - 2 * self._timing.heartbeat_seconds
        return {peer_id for peer_id in self.members() if self._answered_at[peer_id] < oldest}

    def awaits_reports(self) -> bool:
        own = self._place.standing
        # A peer that is left out has reported already, and a peer that stands elsewhere has nothing of this round.
        return any(
            not self.suspicions.is_excluded(peer) and self._standings.get(peer, own) == own
            for peer in self._silent(self._timing.fresh_seconds)
        )

    def misses_member(self) -> bool:
        """Whether some peer that reported from this round has fallen silent, but may come back."""
        own, now = self._place.standing, self._clock.monotonic()
        return any(
            last.standing == own
            and 2 * self._timing.heartbeat_seconds < now - self._answered_at.get(peer, -math.inf)
            and self._may_come_back(peer)
            for peer, last in self.reports.last.items()
        )

    def absent_samples(self, present: Collection[PeerId]) -> int:
        """The samples of this round at living peers that are not `present`, and so would be left out.

        Peers that made too many attempts fail are not counted. All peers that have not reported yet count as one sample
        together, because they may have some. No peer counts for more than a round, so that none can hold up a round
        that others have whole.
        """
        own = self._place.standing
        round_samples = self._place.timeline.at(own.round).round_samples_of(self._block)
        told = sum(
            min(last.progress.num_samples, round_samples)
            for peer, last in self.reports.last.items()
            if peer not in present
            and last.standing == own == self._standings.get(peer, own)
            and self._may_come_back(peer)
            and not self.suspicions.has_failed_for_good(peer)
        )
        return told + self.awaits_reports()

    def _may_come_back(self, peer_id: PeerId) -> bool:
        """Whether a member's last sign of life is so recent that it may still come back."""
        silent_seconds = self._clock.monotonic() - self._answered_at.get(peer_id, -math.inf)
        return silent_seconds < self._timing.missed_seconds

    def awaits_members(self) -> bool:
        """Whether the round is young and a living peer has not reported from it. That peer may still be committing the
        last round.

        If this round were committed now, that peer's contribution would be lost. Or that peer may not know this peer as
        a member yet, because this one has only asked for its standing. Then both would lead.
        """
        oldest = self._clock.monotonic() - self._timing.fresh_seconds
        if self._moved_at <= oldest:
            return False
        alive = {peer_id for peer_id, answered_at in self._answered_at.items() if answered_at >= oldest}
        absent = alive - self.suspicions.suspected - self.members().keys() - {self._own_id}
        is_elsewhere = self._place.branches.is_elsewhere
        return any(not self.suspicions.is_excluded(peer_id) and not is_elsewhere(peer_id) for peer_id in absent)

    @property
    def excludes_self(self) -> bool:
        return self.suspicions.is_excluded(self._own_id)

    def holders(self) -> list[PeerRecord]:
        known = {peer: record for peer, record in self.contacts.all().items() if peer not in self.suspicions.suspected}
        drawn = sorted(known, key=lambda peer: hashlib.sha256(f"{self._own_id} {peer}".encode()).digest())
        return [known[peer] for peer in sorted(drawn[:MOST_ASKED])]

    def strangers(self) -> list[PeerId]:
        """Peers that a leader should call: they should be members, or were in this round, and have not reported lately.

        By calling them a leader makes itself known, and soon learns whether a member has died or left.
        """
        return self._silent(1.5 * self._timing.heartbeat_seconds)

    def _silent(self, seconds: float) -> list[PeerId]:
        """The unsuspected peers that should be members, or were, and have not reported for this many seconds."""
        oldest = self._clock.monotonic() - seconds
        members = {peer for peer, report in self.members().items() if report.heard_at >= oldest}
        # A peer that leaves is not called while it may still report: after such a call it would believe that all is
        # well.
        latest = self._clock.monotonic() - self._timing.fresh_seconds
        unheard = {peer for peer, report in self.reports.last.items() if report.heard_at < latest}
        known = set(self.contacts.serving())
        if unheard:
            known |= unheard & self.contacts.all().keys()
        return [p for p in known if p not in members and p not in self.suspicions.suspected]

    def due_suspects(self) -> list[PeerId]:
        known = self.contacts.all()
        return [peer for peer in self.suspicions.due() if peer in known]

    def alive(self) -> Set[PeerId]:
        return self.contacts.recent() - self.suspicions.suspected | {self._own_id}

    def is_silent(self, peer_id: PeerId) -> bool:
        """Whether another peer is not in `alive`: it gave no sign of life lately.

        It looks at this peer only, because an attempt calls it for every member again and again.
        """
        if peer_id == self._own_id:
            return False
        return peer_id in self.suspicions.suspected or not self.contacts.is_recent(peer_id)
