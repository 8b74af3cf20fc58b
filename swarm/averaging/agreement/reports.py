"""What one peer has heard of the others of its stage: their reports about the round, and whom it cannot rely on."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Set
from dataclasses import dataclass, field

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Ballot, Standing
from swarm.averaging.agreement.timing import Timing
from swarm.machine.clock import Clock
from swarm.rpc.bounds import LONGEST_LIST
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress
from swarm.types import PeerId

MOST_FAILURES = 5
"""So many attempts may fail because of the same member. After that the others go on without it, whatever it holds,
until it takes part in a round again. If the attempts failed for lack of time, the last one waited eight times as long
as the first."""
PROBE_SHARE = 0.05
"""The pause between calls to a suspected peer, as a share of the time for which it has not answered."""


@dataclass(frozen=True, kw_only=True)
class Report:
    progress: Progress
    prepared: Ballot | None
    heard_at: float

    @property
    def standing(self) -> Standing:
        return messages.standing_of(self.progress)


@dataclass(eq=False)
class RoundReports:
    microbatches_at: Callable[[Standing], Container[int]] | None
    """Gives the microbatches of the synchronous round at which a peer stands; None with DiLoCo."""
    current: dict[PeerId, Report] = field(default_factory=dict, init=False)
    """The newest report of each peer that is not suspected."""
    last: dict[PeerId, Report] = field(default_factory=dict, init=False)
    """The newest report of each peer that has reported in this round, even if the peer is gone."""
    _counted: set[int] = field(default_factory=set, init=False)
    _lost: set[int] = field(default_factory=set, init=False)

    def named(self, standing: Standing, gaps: Iterable[int]) -> frozenset[int]:
        """Read the microbatches of its round that a peer names; with DiLoCo none, because only their number matters."""
        if self.microbatches_at is None:
            return frozenset()
        return messages.unpack_indices_of(self.microbatches_at(standing), gaps)

    def hear(self, peer_id: PeerId, report: Report) -> None:
        before = self.last.get(peer_id)
        if before is not None and before.standing == report.standing:
            # The peer was started again, or gave up microbatches that others had as well.
            _add(self._lost, before.progress.committed - report.progress.committed)
        self.count(report.progress.committed)
        self.last[peer_id] = report

    def count(self, committed: Set[int]) -> None:
        _add(self._counted, committed)

    def lose(self, peer_id: PeerId) -> None:
        """Note that a peer is gone, and that what it had committed in this round is lost."""
        if (last := self.last.pop(peer_id, None)) is not None:
            _add(self._lost, last.progress.committed)

    def begin_round(self) -> None:
        """Forget the reports about the last round, but not which peers are there."""
        self.last.clear()
        self._counted.clear()
        self._lost.clear()

    def forget_others(self, known: Collection[PeerId]) -> None:
        self.current = {peer: report for peer, report in self.current.items() if peer in known}
        self.last = {peer: report for peer, report in self.last.items() if peer in known}

    @property
    def counted(self) -> frozenset[int]:
        """The microbatches that any peer has committed in this round, even if that peer is gone."""
        return frozenset(self._counted)

    @property
    def lost(self) -> frozenset[int]:
        """The microbatches that were lost with a peer, and that no other peer has reported."""
        return frozenset(self._lost.difference(*(last.progress.committed for last in self.last.values())))


def _add(known: set[int], more: Set[int]) -> None:
    """Add microbatches to `known`, up to LONGEST_LIST, so that no peer can fill the memory."""
    known |= more
    if len(known) > LONGEST_LIST:
        known.clear()
        known |= more


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    since: float
    called_at: float
    """When the peer was last called."""


@dataclass(frozen=True, kw_only=True)
class _Exclusion:
    seconds: float
    ends_at: float


class Suspicions:
    def __init__(self, clock: Clock, timing: Timing) -> None:
        self._clock = clock
        self._timing = timing
        self._suspected: dict[PeerId, _Suspicion] = {}
        self._excluded: dict[PeerId, _Exclusion] = {}
        self._num_failures: Counter[PeerId] = Counter()
        """Attempts that failed because of a peer since it took part in a round."""

    @property
    def suspected(self) -> Set[PeerId]:
        """Peers that a call failed to reach, and that have given no sign of life since."""
        return self._suspected.keys()

    def suspect(self, peer_id: PeerId) -> None:
        now, before = self._clock.monotonic(), self._suspected.get(peer_id)
        self._suspected[peer_id] = _Suspicion(since=before.since if before else now, called_at=now)

    def answered(self, peer_id: PeerId) -> None:
        self._suspected.pop(peer_id, None)

    def suspect_none(self) -> None:
        self._suspected.clear()

    def due(self) -> list[PeerId]:
        """Suspected peers that should be called again. The longer a peer has been gone, the less often it is called."""
        now, least = self._clock.monotonic(), self._timing.probe_seconds
        return [
            peer
            for peer, suspicion in self._suspected.items()
            if now - suspicion.called_at >= max(least, PROBE_SHARE * (suspicion.called_at - suspicion.since))
        ]

    def exclude(self, peer_id: PeerId) -> None:
        """Leave a living peer out of this round for a while: each time for twice as long, up to a limit."""
        previous = self._excluded.get(peer_id)
        doubled = 2 * previous.seconds if previous else self._timing.exclusion_seconds
        seconds = min(doubled, self._timing.max_exclusion_seconds)
        self._excluded[peer_id] = _Exclusion(seconds=seconds, ends_at=self._clock.monotonic() + seconds)
        self.failed(peer_id)

    def leave_out(self, peer_id: PeerId) -> None:
        """Leave a living peer out of this round to its end, because its contribution would be as wrong again."""
        self._excluded[peer_id] = _Exclusion(seconds=self._timing.exclusion_seconds, ends_at=math.inf)

    def is_excluded(self, peer_id: PeerId) -> bool:
        exclusion = self._excluded.get(peer_id)
        return exclusion is not None and exclusion.ends_at > self._clock.monotonic()

    def failed(self, peer_id: PeerId) -> None:
        self._num_failures[peer_id] += 1

    def has_failed_for_good(self, peer_id: PeerId) -> bool:
        return self._num_failures[peer_id] >= MOST_FAILURES

    def begin_round(self, members: Collection[str]) -> None:
        """Begin a round from which no peer is left out. The members of the last round have their failures forgotten."""
        for peer_id in self._num_failures.keys() & set(members):
            del self._num_failures[peer_id]
        self._excluded.clear()

    def forget_others(self, known: Collection[PeerId]) -> None:
        for by_peer in (self._suspected, self._num_failures):
            for peer_id in by_peer.keys() - known:
                del by_peer[peer_id]


class PassedOver:
    """The peers that do not lead any more, because a whole round stood still under them, and who says so.

    A peer that has itself seen it believes it once most of the others say so too. A peer that has not believes most of
    the others, unless the last round was committed under that leader: no single member can so bring a leader down.

    Attributes:
        peers: those that this peer passes over.
    """

    def __init__(self, own_id: PeerId) -> None:
        self._own_id = own_id
        self.peers: set[PeerId] = set()
        self._seen: set[PeerId] = set()
        """Leaders under which this peer itself saw a whole round stand still."""
        self._told: dict[PeerId, frozenset[PeerId]] = {}
        """By peer, the leaders that it does not follow."""
        self._last: PeerId | None = None
        """The leader of the last round that this peer knows to be committed."""

    @property
    def told(self) -> list[PeerId]:
        return sorted(self.peers | self._seen)

    def hear(self, peer_id: PeerId, idle: Collection[PeerId]) -> None:
        self._told[peer_id] = frozenset(idle)

    def see(self, leader_id: PeerId) -> None:
        self._seen.add(leader_id)

    def committed(self, outcome: pb.Outcome) -> None:
        self._last = PeerId(outcome.prepared.ballot.leader_id)

    def judge(self, alive: Collection[PeerId]) -> set[PeerId]:
        """Return the peers that are passed over from now on, and were not before. `alive` are the peers at this peer's
        place in the run."""
        before = set(self.peers)
        for leader_id in self._seen.union(*self._told.values()) - before:
            others = set(alive) - {leader_id, self._own_id}
            if leader_id != self._own_id or len(others) == 1:
                # The word of a peer under which a round stood still does not count, but most of several may be right.
                others -= self._seen
            num_voters = sum(leader_id in self._told.get(peer, ()) for peer in others)
            has_seen = leader_id in self._seen
            # A single peer may not bring down the leader of the last round, be it this one or another.
            is_believed = has_seen or leader_id != self._last or (leader_id == self._own_id and num_voters > 1)
            if is_believed and 2 * (num_voters + has_seen) > len(others) + has_seen:
                self.peers.add(leader_id)
        passed_over = self.peers - before
        if self.peers >= {self._own_id, *alive}:
            # Of two, the one that saw the other stand still leads. If more have all failed, they begin again in turn.
            self.peers &= self._seen if len(alive) == 1 else set()
            passed_over &= self.peers
            if not self.peers:
                self._seen.clear()
                self._told.clear()
        return passed_over

    def forget_others(self, known: Collection[PeerId]) -> None:
        known = {*known, self._own_id}
        self._told = {peer: idle for peer, idle in self._told.items() if peer in known}
        for peers in (self.peers, self._seen):
            peers.intersection_update(known)
