"""One block's priority queue of peers, for the router (swarm.routing.router).

Every choice takes the peer with the least expected finish time, and adds to that time what the work will take there. So
shares follow throughput (interleaved weighted round-robin, SWARM, arXiv 2301.11913, Algorithm 1). Finish times are in
virtual time, which only choices advance (self-clocked fair queueing, Golestani 1994): an idle period gives no peer
credit or debt, and a router that sends a small part of a stage's load keeps the same shares as one that sends it all.
Never waits, never scans: a choice is O(log peers).
"""

import heapq
import itertools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.errors import LONGEST_BUSY_SECONDS
from swarm.routing.bans import Bans
from swarm.routing.throughput import SHORTEST_SECONDS, Link, MovingAverage, Observation, SecondsPerSample
from swarm.types import PeerId, PeerRecord

MAX_SLOWNESS = 50.0
"""No peer counts as slower than this multiple of the stage's typical time, so that even the slowest is tried again."""
MAX_CLAIM = 4.0
"""Until its first reply, a peer is charged at least the typical time divided by this, whatever speed it claims."""
CHANCE = 0.25
"""The most by which chance changes a charge, as a share. With more, some peers' queues grow while others are idle."""
NOBODY = PeerId("")
STAGE_SMOOTHING = 0.01
"""Weight of the newest observation in the stage's typical time."""


@dataclass(eq=False, slots=True)
class _Member:
    record: PeerRecord
    seconds_per_sample: SecondsPerSample
    link: Link
    priority: float = 0.0
    """Virtual time at which the peer's expected work ends. Only grows."""
    busy_until: float = -math.inf
    busy_reason: str = ""
    ticket: int = -1
    """The number of the peer's only valid heap entry."""


_Entry = tuple[float, int, _Member]


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A peer that is not chosen until a time, in monotonic seconds, and why, in words for people: it merely has no room
    and `is_busy`, or has failed, and `is_silent` if it did not answer."""

    record: PeerRecord
    reason: str
    until: float
    is_busy: bool
    is_silent: bool


class PeerQueue:
    """The serving peers of one block. Every `now` is monotonic seconds."""

    def __init__(self, rng: random.Random, own: PeerId = NOBODY) -> None:
        """`own` is the peer that this process is, if it is one: a hop to it costs nothing."""
        self._rng = rng
        self._own = own
        self._members: dict[PeerId, _Member] = {}
        self._bans = Bans()
        # Heap by virtual time; an entry's key may lag behind its member's priority.
        self._ready: list[_Entry] = []
        # Heap by the monotonic time at which a new, busy or banned member can be chosen (again).
        self._away: list[_Entry] = []
        self._tickets = itertools.count()
        self._virtual_now = 0.0
        # The number of samples of the last choice, and so probably of the next.
        self._num_samples = 1
        # It averages logarithms, so that a few absurd values do not move it far.
        self._log_typical = MovingAverage(STAGE_SMOOTHING)
        # Seconds per sample, a geometric mean over the recent traffic; None while nothing is known of any peer.
        self._typical: float | None = None

    # -- which peers are there ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def record(self, peer_id: PeerId) -> PeerRecord | None:
        member = self._members.get(peer_id)
        return None if member is None else member.record

    def expected_seconds(self, peer_id: PeerId, num_samples: int) -> float | None:
        """How long a member probably takes for `num_samples`; None if nothing is known of any peer."""
        if self._typical is None or (member := self._members.get(peer_id)) is None:
            return None
        return num_samples * self._expected(member)

    def records(self) -> list[PeerRecord]:
        return [member.record for member in self._members.values()]

    def update(self, records: Sequence[PeerRecord], now: float) -> None:
        """Make the peers of `records` the members. O(peers)."""
        present = {record.peer_id for record in records}
        for peer_id in [peer_id for peer_id in self._members if peer_id not in present]:
            self._remove(peer_id)
        for record in records:
            self._announced(record, now)
        self._bans.forget(now, but=self._members.keys())

    def _remove(self, peer_id: PeerId) -> None:
        self._members.pop(peer_id).ticket = -1

    def _announced(self, record: PeerRecord, now: float) -> None:
        peer_id = PeerId(record.peer_id)
        member = self._members.get(peer_id)
        if member is not None and member.record.place != record.place:
            # It is another process now, perhaps on another machine, of which no measurement need be true.
            self._remove(peer_id)
            member = None
        if member is None:
            member = self._members[peer_id] = _Member(record, SecondsPerSample(), Link())
            member.seconds_per_sample.announced(record, at_most=self._longest)
            self._learn_typical(member.seconds_per_sample.expected)
            self._set_aside(member, now)
        elif record.announced_at > member.record.announced_at:
            member.seconds_per_sample.announced(record, at_most=self._longest)
        member.record = record
        if self._bans.announced(peer_id, record.announced_at, now):
            self._set_aside(member, now)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(
        self, num_samples: int, now: float, *, exclude: Collection[PeerId], prefer: PeerId | None
    ) -> PeerRecord | None:
        """Choose and charge the peer in `prefer` unless it is banned, or else the own peer unless it is busy, or else
        the peer with the least finish time.

        A preferred peer is chosen even when busy: it knows the microbatch already. None if no peer can be asked.
        """
        self._num_samples = num_samples
        own = self._members.get(self._own)
        for peer_id in filter(None, (prefer, None if own is None or own.busy_until > now else self._own)):
            if peer_id in self._members and peer_id not in exclude and self._bans.until(peer_id) <= now:
                # Its heap entry catches up when it reaches the head.
                return self._charge(self._members[peer_id], num_samples)
        skipped = []
        while (head := self._head(now)) is not None and head.record.peer_id in exclude:
            skipped.append(heapq.heappop(self._ready))
        if head is not None:
            # Excluded peers that were passed over are now behind virtual time, and get no credit for that.
            self._virtual_now = max(self._virtual_now, head.priority)
            self._charge(head, num_samples)
            heapq.heapreplace(self._ready, (head.priority, head.ticket, head))
        for entry in skipped:
            heapq.heappush(self._ready, entry)
        return None if head is None else head.record

    def next_available_seconds(self, now: float) -> float | None:
        """The seconds until a peer can be chosen: 0 if one can be now, None if there is no member."""
        if self._head(now) is not None:
            return 0.0
        while self._away and self._away[0][2].ticket != self._away[0][1]:
            heapq.heappop(self._away)
        return self._away[0][0] - now if self._away else None

    def _charge(self, member: _Member, num_samples: int) -> PeerRecord:
        # The random factor, of mean 1, makes paths stochastic, and keeps the routers of several trainers out of step.
        seconds = num_samples * self._expected(member) * self._rng.uniform(1.0 - CHANCE, 1.0 + CHANCE)
        member.priority = max(member.priority, self._virtual_now) + seconds
        return member.record

    def _head(self, now: float) -> _Member | None:
        """Bring back peers that are due, drop invalid entries, and return the next peer, whose entry is _ready[0]."""
        while self._away and self._away[0][0] <= now:
            _, ticket, member = heapq.heappop(self._away)
            if member.ticket == ticket:
                self._enter(member)
        while self._ready:
            priority, ticket, member = self._ready[0]
            if member.ticket != ticket:
                heapq.heappop(self._ready)
            elif priority < member.priority:
                heapq.heapreplace(self._ready, (member.priority, ticket, member))
            else:
                return member
        return None

    def _enter(self, member: _Member) -> None:
        # A newcomer enters at a random point of its first turn, as if it had always been there. If it entered at the
        # head, the routers of all trainers would send their next microbatch to it.
        turn_seconds = self._num_samples * self._expected(member)
        member.priority = max(member.priority, self._virtual_now + self._rng.random() * turn_seconds)
        heapq.heappush(self._ready, (member.priority, member.ticket, member))

    def _set_aside(self, member: _Member, now: float) -> None:
        """Let a member wait until it is neither busy nor banned; its older heap entry becomes invalid."""
        member.ticket = next(self._tickets)
        until = max(now, member.busy_until, self._bans.until(PeerId(member.record.peer_id)))
        heapq.heappush(self._away, (until, member.ticket, member))

    # -- what came of a choice ---------------------------------------------------------------------------------------

    def succeeded(self, peer_id: PeerId, now: float, reply: Observation) -> None:
        """Learn from a peer's reply, which also ends its ban."""
        member = self._members[peer_id]
        member.link.observe(reply)
        self._learn_typical(member.seconds_per_sample.observe(reply, at_most=self._longest))
        if self._bans.succeeded(peer_id, now):
            self._set_aside(member, now)

    def busy(self, peer_id: PeerId, now: float, retry_after_seconds: float, reason: str = "") -> None:
        """Leave a peer alone for a while. It stays charged for the choice, as its queue is longer than was expected."""
        member = self._members[peer_id]
        member.busy_reason = reason
        member.busy_until = max(member.busy_until, now + min(LONGEST_BUSY_SECONDS, retry_after_seconds))
        self._set_aside(member, now)

    def failed(
        self, peer_id: PeerId, now: float, *, is_gone: bool = False, is_unreachable: bool = False, reason: str = ""
    ) -> None:
        member = self._members[peer_id]
        announced_at = member.record.announced_at
        if self._bans.failed(
            peer_id, now, announced_at=announced_at, is_gone=is_gone, is_unreachable=is_unreachable, reason=reason
        ):
            self._set_aside(member, now)

    def unreachable(self, now: float) -> list[PeerRecord]:
        return [self._members[peer_id].record for peer_id in self._bans.unreachable(now) if peer_id in self._members]

    def answered(self, peer_id: PeerId, now: float) -> None:
        if self._bans.answered(peer_id, now):
            self._set_aside(self._members[peer_id], now)

    def unanswered(self, peer_id: PeerId, now: float, seconds: float) -> None:
        if self._bans.unanswered(peer_id, now, seconds):
            self._set_aside(self._members[peer_id], now)

    def links(self) -> dict[PeerId, Link]:
        return {peer_id: member.link for peer_id, member in self._members.items() if peer_id != self._own}

    def left_alone(self, now: float) -> list[LeftAlone]:
        silent, found = set(self._bans.unreachable(now)), list[LeftAlone]()
        for peer_id, member in self._members.items():
            banned_until = self._bans.until(peer_id)
            until = max(banned_until, member.busy_until)
            if until > now:
                is_busy = banned_until <= now
                reason = member.busy_reason if is_busy else self._bans.reason(peer_id)
                found.append(LeftAlone(member.record, reason, until, is_busy, peer_id in silent))
        return found

    def banned(self, now: float) -> set[PeerId]:
        return {peer_id for peer_id in self._members if self._bans.until(peer_id) > now}

    @property
    def _longest(self) -> float:
        """The most seconds per sample that any peer counts with."""
        return math.inf if self._typical is None else MAX_SLOWNESS * self._typical

    def _expected(self, member: _Member) -> float:
        """The seconds per sample to charge a member, bounded by what is typical of the stage."""
        if self._typical is None:
            return SHORTEST_SECONDS  # All peers are equal, and the first one chosen must not be set back for long.
        expected = member.seconds_per_sample.expected
        if expected is None:
            return self._typical
        if not member.seconds_per_sample.observed:
            expected = max(expected, self._typical / MAX_CLAIM)
        return min(expected, self._longest)

    def _learn_typical(self, seconds_per_sample: float | None) -> None:
        if seconds_per_sample is not None:
            self._log_typical.observe(math.log(seconds_per_sample))
            assert self._log_typical.value is not None
            self._typical = math.exp(self._log_typical.value)
