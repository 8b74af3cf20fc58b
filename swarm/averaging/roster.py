"""Who is in the group, as one peer sees it: reports, suspicions, and who leads.

Used by all parts of an averager. Draws on the directory's last view and on what peers say themselves, so the group
goes on when the directory is out of reach. Pure but for the clock it is given.
"""

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from swarm.averaging import messages
from swarm.averaging.group import Ballot
from swarm.averaging.messages import Standing
from swarm.averaging.rules import leader_of
from swarm.averaging.timing import Timing
from swarm.averaging.transport import record_of
from swarm.machine.clock import Clock
from swarm.rpc.bounds import LONGEST_LIST
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress
from swarm.types import PeerId, PeerRecord, PeerState

MOST_UNLISTED = 64
"""Peers that are remembered though the directory has not listed them: many more than join within the seconds that a
record takes to spread, and too few to fill the memory with what somebody says in the name of peers that he made up."""
MOST_FAILURES = 5
"""Attempts that may fail because of the same member. Then the others go on without it, whatever it holds, until it has
taken part in a round: where they ran out of time, the last of them had eight times the patience of the first."""
MOST_ASKED = 32
"""Peers that are asked at once where they stand."""
PROBE_SHARE = 0.05
"""Of the time for which a peer has not answered: so long it is left alone."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The newest word of a member."""

    progress: Progress
    prepared: Ballot | None
    heard_at: float

    @property
    def standing(self) -> Standing:
        """Where its sender is."""
        return messages.standing_of(self.progress)


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    since: float
    called_at: float
    """The last attempt to reach the peer."""


@dataclass(frozen=True, kw_only=True)
class _Exclusion:
    seconds: float
    ends_at: float


class Roster:
    """One stage's peers."""

    def __init__(
        self, *, own: PeerRecord, directory: Callable[[], Sequence[PeerRecord]], clock: Clock, timing: Timing,
        branches_yield: bool, round_microbatches: int | None,
        is_elsewhere: Callable[[PeerId], bool] = lambda peer_id: False,
    ) -> None:  # fmt: skip
        """
        Args:
            is_elsewhere: whether it is settled that a peer is in another place in the run, however far it says it is.
            round_microbatches: of a synchronous round; None with DiLoCo.
        """
        self.own = own
        self._directory = directory
        self._clock = clock
        self._timing = timing
        self._branches_yield = branches_yield
        self._round_microbatches = round_microbatches
        self._is_elsewhere = is_elsewhere
        self._contacts: dict[PeerId, tuple[PeerRecord, float]] = {}
        self._listed_at: dict[str, float] = {}
        """When the directory listed a peer last, as far as was looked."""
        self._reports: dict[PeerId, Report] = {}
        self._last_words: dict[PeerId, Report] = {}
        """Of peers that were heard of in this round, present or not."""
        self._counted: set[int] = set()
        """What anybody is known to have committed in this round."""
        self._lost: set[int] = set()
        """What has died with a peer."""
        self._standings: dict[PeerId, Standing] = {}
        self._answered_at: dict[PeerId, float] = {}
        """The last sign of life."""
        self._suspects: dict[PeerId, _Suspicion] = {}
        self._exclusions: dict[PeerId, _Exclusion] = {}
        self._num_failures: Counter[PeerId] = Counter()
        """Attempts that failed because of a peer since it took part in a round."""
        self._moved_at = clock.monotonic()

    # -- news --------------------------------------------------------------------------------------------------------

    def learn(self, contact: pb.Contact) -> PeerRecord:
        """Remember how a peer is reached. Raises MalformedMessage for a wrong contact."""
        record = record_of(contact, self.own.stage)
        peer_id = PeerId(record.peer_id)
        if peer_id != self.own.peer_id:
            # Reports come many times a second, newcomers seldom.
            if peer_id not in self._contacts and len(self._contacts) >= MOST_UNLISTED:
                self._make_room(peer_id)
            self._contacts[peer_id] = record, self._clock.monotonic()
        return record

    def _make_room(self, peer_id: PeerId) -> None:
        """For one more peer. Of those that the directory has not listed, who was heard of longest ago is forgotten."""
        self._see_listed()
        unlisted = sorted(self._contacts.keys() - self._listed_at.keys(), key=lambda peer: self._contacts[peer][1])
        num_needless = len(unlisted) + (peer_id not in self._listed_at) - MOST_UNLISTED
        if num_needless > 0:
            for needless in unlisted[:num_needless]:
                del self._contacts[needless]
            self._forget_unknown()

    def hear(self, request: pb.ReportRequest) -> bool:
        """Take a report; whether it tells of anything new. Raises MalformedMessage for one that makes no sense."""
        standing, prepared = messages.unpack_standing(request.standing), messages.unpack_ballot(request.prepared)
        peer_id = PeerId(self.learn(request.sender).peer_id)
        progress = Progress(
            round=standing.round, lineage=standing.lineage, run_samples=standing.run_samples,
            num_samples=request.num_samples, committed=self.named(standing.round, request.committed_gaps),
            highest_microbatch=request.highest_microbatch,
        )  # fmt: skip
        previous = self._reports.get(peer_id)
        report = Report(progress=progress, prepared=prepared, heard_at=self._clock.monotonic())
        self._reports[peer_id] = report
        self._listen(peer_id, report)
        self.answered(peer_id, report.standing)
        return previous is None or dataclasses.replace(previous, heard_at=report.heard_at) != report

    def named(self, round_number: int, gaps: Iterable[int]) -> frozenset[int]:
        """The microbatches of a round that a peer names; with DiLoCo none, whatever it names: nobody asks which."""
        size = self._round_microbatches
        if size is None:
            return frozenset()
        return messages.unpack_indices_of(range(round_number * size, (round_number + 1) * size), gaps)

    def answered(self, peer_id: PeerId, standing: Standing | None) -> None:
        """A peer gave a sign of life; `standing` is None while it is about to move."""
        self._suspects.pop(peer_id, None)
        self._answered_at[peer_id] = now = self._clock.monotonic()
        if (known := self._contacts.get(peer_id)) is not None:
            # A leader does not report: where its announcements fail, it is known by its answers alone.
            self._contacts[peer_id] = known[0], now
        if standing is not None:
            self._standings[peer_id] = standing

    def heard_of_round(self, peer_id: PeerId, progress: Progress, counted: Set[int]) -> None:
        """A peer told what it has of the round, a leader also what anybody has: whoever leads after it has to know."""
        _add(self._counted, counted)
        self._listen(peer_id, Report(progress=progress, prepared=None, heard_at=self._clock.monotonic()))

    def _listen(self, peer_id: PeerId, report: Report) -> None:
        before = self._last_words.get(peer_id)
        if before is not None and before.standing == report.standing:
            # Started again, or it gave up what others had.
            _add(self._lost, before.progress.committed - report.progress.committed)
        _add(self._counted, report.progress.committed)
        self._last_words[peer_id] = report

    def suspect(self, peer_id: PeerId, *, is_gone: bool = False) -> None:
        """A call to a peer failed: it neither leads nor takes part until it gives a sign of life.

        Args:
            is_gone: nobody listens where it was: what it had committed in this round is lost.
        """
        now, before = self._clock.monotonic(), self._suspects.get(peer_id)
        self._suspects[peer_id] = _Suspicion(since=before.since if before else now, called_at=now)
        self._reports.pop(peer_id, None)
        if is_gone and (last := self._last_words.pop(peer_id, None)) is not None:
            _add(self._lost, last.progress.committed)
        self._standings.pop(peer_id, None)

    def forget_report(self, peer_id: PeerId) -> None:
        """What a peer reported turned out to be out of date."""
        self._reports.pop(peer_id, None)

    def forget(self) -> None:
        """This peer heard nothing for a while, through no fault of the others: all have to be asked again."""
        self._suspects.clear()
        self._reports.clear()

    def exclude(self, peer_id: PeerId) -> None:
        """Leave a peer out of this round for a while, though it is alive; each time for twice as long, to a limit."""
        previous = self._exclusions.get(peer_id)
        doubled = 2 * previous.seconds if previous else self._timing.exclusion_seconds
        seconds = min(doubled, self._timing.max_exclusion_seconds)
        self._exclusions[peer_id] = _Exclusion(seconds=seconds, ends_at=self._clock.monotonic() + seconds)
        self.failed(peer_id)

    def failed(self, peer_id: PeerId) -> None:
        """An attempt came to nothing because of a peer, or was carried on without it."""
        self._num_failures[peer_id] += 1

    def moved(self, own: Standing, members: Collection[str] = ()) -> None:
        """This peer is at a new round: what is known of others at earlier ones is out of date.

        Args:
            members: of the round before.
        """
        for peer_id in self._num_failures.keys() & set(members):
            del self._num_failures[peer_id]
        self._moved_at = self._clock.monotonic()
        self._exclusions.clear()
        self._last_words.clear()
        self._counted.clear()
        self._lost.clear()
        self._standings = {peer: theirs for peer, theirs in self._standings.items() if not self.is_ahead(own, theirs)}
        self._forget_the_gone()

    def _forget_the_gone(self) -> None:
        """Peers that are not announced and were not heard of for long: in weeks they would become many."""
        self._see_listed()
        oldest = self._clock.monotonic() - self._timing.forget_seconds
        self._contacts = {p: contact for p, contact in self._contacts.items() if contact[1] >= oldest}
        self._forget_unknown()

    def _see_listed(self) -> None:
        """Remember whom the directory lists: where it is out of reach for a while, these are no strangers."""
        now = self._clock.monotonic()
        oldest = now - self._timing.forget_seconds
        self._listed_at = {peer: at for peer, at in self._listed_at.items() if at >= oldest}
        self._listed_at |= dict.fromkeys((record.peer_id for record in self._directory()), now)

    def _forget_unknown(self) -> None:
        """All that was noted of peers that cannot be reached any more, for nobody knows how."""
        known = self._peers(serving=False).keys()
        for by_peer in (
            self._reports, self._last_words, self._standings, self._answered_at, self._suspects, self._num_failures,
        ):  # fmt: skip
            for peer_id in by_peer.keys() - known:
                del by_peer[peer_id]

    @property
    def num_remembered(self) -> int:
        """Peers of which anything is noted; bounded, whatever others say."""
        noted = (self._contacts, self._reports, self._last_words, self._standings, self._answered_at, self._suspects)
        return len(set[PeerId]().union(*noted))

    # -- questions ---------------------------------------------------------------------------------------------------

    def is_ahead(self, one: Standing, other: Standing) -> bool:
        """Whether a peer standing at `other` should become what `one` is."""
        return one > other if self._branches_yield else one.round > other.round

    def leader(self, own: Standing) -> PeerId:
        """The leader of the peers that serve, are not suspected, and stand where this one does, or ahead of it.

        This peer is one of them, unless somebody is ahead of it. Who is elsewhere is neither.
        """
        there, ahead = {PeerId(self.own.peer_id)}, set[PeerId]()
        for peer_id in self._peers(serving=True):
            standing = self._standings.get(peer_id, own)
            if peer_id in self._suspects or self._is_elsewhere(peer_id):
                continue
            if self.is_ahead(standing, own):
                ahead.add(peer_id)
            elif standing == own:
                there.add(peer_id)
        if ahead:
            there.discard(PeerId(self.own.peer_id))
        return leader_of(there | ahead)

    def members(self, own: Standing) -> dict[PeerId, Report]:
        """Other peers that reported lately, from the same round of the same branch."""
        oldest = self._clock.monotonic() - self._timing.fresh_seconds
        return {
            peer_id: report
            for peer_id, report in self._reports.items()
            if report.heard_at >= oldest and report.standing == own and not self._is_excluded(peer_id)
        }

    def overdue(self, own: Standing) -> Set[PeerId]:
        """Members that have missed a heartbeat: they may just have been frozen or cut off."""
        oldest = self._clock.monotonic() - 2 * self._timing.heartbeat_seconds
        return {peer_id for peer_id in self.members(own) if self._answered_at[peer_id] < oldest}

    @property
    def counted(self) -> frozenset[int]:
        """What any other peer has committed in this round, though it may be gone with it."""
        return frozenset(self._counted)

    @property
    def lost(self) -> frozenset[int]:
        """What has died with a peer, and none of the others has told that it has it."""
        return frozenset(self._lost.difference(*(last.progress.committed for last in self._last_words.values())))

    def awaits_reports(self, own: Standing) -> bool:
        """Whether a serving peer has not told what it has, and nothing speaks against its being alive."""
        # Who is left out has told, and who is known to be elsewhere has nothing of this round.
        return any(
            not self._is_excluded(peer) and self._standings.get(peer, own) == own
            for peer in self._silent(own, self._timing.fresh_seconds)
        )

    def misses_member(self, own: Standing) -> bool:
        """Whether a peer that has told what it has of this round fell silent of late, and is not known to be gone."""
        now = self._clock.monotonic()
        return any(
            last.standing == own
            and 2 * self._timing.heartbeat_seconds < now - self._answered_at.get(peer, -math.inf)
            and self._may_come_back(peer)
            for peer, last in self._last_words.items()
        )

    def absent_samples(self, own: Standing, present: Collection[PeerId]) -> int:
        """Samples of this round that would be left out with those who are not `present`, though they live.

        Of the peers that have failed in MOST_FAILURES attempts none is counted. Who has not told yet what it has counts
        as one sample: it may have some.
        """
        told = sum(
            last.progress.num_samples
            for peer, last in self._last_words.items()
            if peer not in present
            and last.standing == own == self._standings.get(peer, own)
            and self._may_come_back(peer)
            and not self.has_failed_for_good(peer)
        )
        return told + self.awaits_reports(own)

    def has_failed_for_good(self, peer_id: PeerId) -> bool:
        """Whether so many attempts have failed because of a peer that it is not waited for any more."""
        return self._num_failures[peer_id] >= MOST_FAILURES

    def _may_come_back(self, peer_id: PeerId) -> bool:
        """Whether a member gave a sign of life not too long ago."""
        silent_seconds = self._clock.monotonic() - self._answered_at.get(peer_id, -math.inf)
        return silent_seconds < self._timing.missed_seconds

    def awaits_members(self, own: Standing) -> bool:
        """Whether the round is young and a peer that is alive has not reported from it: it may still be committing.

        Without it, its contribution would be lost to a round that is complete at once.
        """
        if self._clock.monotonic() - self._moved_at >= self._timing.fresh_seconds:
            return False
        absent = self.alive() - self.members(own).keys() - {self.own.peer_id}
        return any(not self._is_excluded(peer_id) and not self._is_elsewhere(peer_id) for peer_id in absent)

    @property
    def excludes_self(self) -> bool:
        """Whether this peer's own contribution is left out of this round."""
        return self._is_excluded(PeerId(self.own.peer_id))

    def record(self, peer_id: PeerId) -> PeerRecord | None:
        """How a peer is reached."""
        return self._peers(serving=False).get(peer_id)

    def records(self, peer_ids: Iterable[PeerId]) -> dict[PeerId, PeerRecord]:
        """How other peers are reached, those of them that are known."""
        known = self._peers(serving=False)
        return {peer_id: known[peer_id] for peer_id in peer_ids if peer_id in known}

    def holders(self) -> list[PeerRecord]:
        """Whom to ask where the stage is: all that may answer, or MOST_ASKED of them, drawn by their ids' hashes."""
        known = {peer: record for peer, record in self._peers(serving=False).items() if peer not in self._suspects}
        drawn = sorted(known, key=lambda peer: hashlib.sha256(f"{self.own.peer_id} {peer}".encode()).digest())
        return [known[peer] for peer in sorted(drawn[:MOST_ASKED])]

    def standings_announced(self) -> dict[PeerId, Standing]:
        """Where other peers were when they announced themselves last, by records that they signed."""
        return {
            PeerId(record.peer_id): Standing(run_samples=record.samples, round=record.round, lineage=record.lineage)
            for record in self._directory()
            if record.peer_id != self.own.peer_id
        }

    def strangers(self, own: Standing) -> list[PeerId]:
        """Peers that should be members, or were in this round, and have not reported of late: a leader calls them.

        So it makes itself known, and learns soon that one has died, or left with what it had.
        """
        return self._silent(own, 1.5 * self._timing.heartbeat_seconds)

    def _silent(self, own: Standing, seconds: float) -> list[PeerId]:
        """Those of them, not suspected, that have not reported as members for so long."""
        oldest = self._clock.monotonic() - seconds
        members = {peer for peer, report in self.members(own).items() if report.heard_at >= oldest}
        # A leaver is left alone while it may report by itself: a call would have it believe that all is well.
        latest = self._clock.monotonic() - self._timing.fresh_seconds
        unheard = {peer for peer, report in self._last_words.items() if report.heard_at < latest}
        known = set(self._peers(serving=True))
        if unheard:
            known |= unheard & self._peers(serving=False).keys()
        return [p for p in known if p not in members and p not in self._suspects]

    def is_suspected(self, peer_id: PeerId) -> bool:
        """Whether a call to a peer failed, and there was no sign of life since."""
        return peer_id in self._suspects

    def due_suspects(self) -> list[PeerId]:
        """Suspected peers, still announced or heard of, that should be called again: the longer gone, the rarer."""
        now, least, known = self._clock.monotonic(), self._timing.probe_seconds, self._peers(serving=False)
        return [
            peer
            for peer, suspicion in self._suspects.items()
            if now - suspicion.called_at >= max(least, PROBE_SHARE * (suspicion.called_at - suspicion.since))
            and peer in known
        ]

    def announced(self) -> Set[PeerId]:
        """Other peers that serve or were heard of lately, whether they can be reached or not."""
        return self._peers(serving=True).keys()

    def alive(self) -> Set[PeerId]:
        """Peers, this one included, that gave a sign of life lately."""
        oldest = self._clock.monotonic() - self._timing.fresh_seconds
        recent = {peer for peer, (_, heard_at) in self._contacts.items() if heard_at >= oldest}
        return recent - self._suspects.keys() | {PeerId(self.own.peer_id)}

    def is_silent(self, peer_id: PeerId) -> bool:
        """Whether another peer is not `alive`: it gave no sign of life lately, though peers do so all the time.

        Asked of every member again and again while an attempt lasts, so that it does not go through all of them.
        """
        if peer_id == self.own.peer_id:
            return False
        _, heard_at = self._contacts.get(peer_id, (None, -math.inf))
        return peer_id in self._suspects or heard_at < self._clock.monotonic() - self._timing.fresh_seconds

    def _is_excluded(self, peer_id: PeerId) -> bool:
        exclusion = self._exclusions.get(peer_id)
        return exclusion is not None and exclusion.ends_at > self._clock.monotonic()

    def _peers(self, *, serving: bool) -> dict[PeerId, PeerRecord]:
        oldest = self._clock.monotonic() - self._timing.fresh_seconds
        peers = {p: record for p, (record, at) in self._contacts.items() if at >= oldest or not serving}
        for record in self._directory():
            peer_id = PeerId(record.peer_id)
            if not serving or record.state is PeerState.SERVING:
                peers[peer_id] = record
            elif record.state is PeerState.LEAVING:
                peers.pop(peer_id, None)
        peers.pop(PeerId(self.own.peer_id), None)
        return peers


def _add(known: set[int], more: Set[int]) -> None:
    """Remember more microbatches of a round. Nobody has so many of them; who says so does not fill the memory."""
    known |= more
    if len(known) > LONGEST_LIST:
        known.clear()
        known |= more
