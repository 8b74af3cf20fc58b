"""What a process has learnt about peers' speed: how long each is expected to take over one sample.

Peers' own figures are bounded, not trusted, and NaN counts as slow. Never reads a clock.
"""

from collections import deque
from dataclasses import dataclass

from swarm.types import PeerRecord

PEER_SMOOTHING = 0.2
"""Weight of a peer's newest observation, so that about five of them matter."""

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-6, 1e6
"""Bounds of every measured time. The lower one is not zero, or a peer that costs nothing would be chosen for ever."""
_LONGEST_QUEUE = 1000
"""Bound of a peer's queue length, for which peers may announce integers of any size."""
_TOGETHER = 8
"""The arrivals that make one measurement of a line."""
_KEPT = 8
"""The measurements of which the fastest counts: what the line carries when nothing else holds up what is sent."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    num_samples: int
    busy_seconds: float | None
    """How long the peer itself computed for these samples, forward and backward, as it reports. (The whole call also
    contains everything downstream.) None if these samples are not typical, such as those of a replay."""
    link_seconds: float | None
    """The time from the first byte sent to the message that all have arrived; None if nothing was sent."""
    round_trip_seconds: float | None = None
    """Of a request of a few bytes; None if there was none."""
    num_bytes: int = 0
    queue_length: int
    """How many tasks wait at the peer. A forward or a backward is one task, half of a microbatch's work. A microbatch
    waits twice, for its forward and for its backward, so each waiting task costs it one `busy_seconds`."""


class MovingAverage:
    """Exponential moving average, corrected for its start: the first observation counts in full."""

    def __init__(self, smoothing: float) -> None:
        self._keep = 1.0 - smoothing
        self._total = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float | None:
        """None before the first observation."""
        return self._total / self._weight if self._weight else None

    def observe(self, value: float) -> None:
        self._total = self._keep * self._total + value
        self._weight = self._keep * self._weight + 1.0


class Link:
    """Measurements of the line to one peer. They are only shown to people."""

    def __init__(self) -> None:
        self._round_trip = MovingAverage(PEER_SMOOTHING)
        self._rate = MovingAverage(PEER_SMOOTHING)

    @property
    def round_trip_seconds(self) -> float | None:
        return self._round_trip.value

    @property
    def bytes_per_second(self) -> float | None:
        """The rate of tensors to the peer, their round trip included."""
        return self._rate.value

    def observe(self, reply: Observation) -> None:
        if reply.round_trip_seconds is not None:
            self._round_trip.observe(_bounded(reply.round_trip_seconds))
        if reply.link_seconds is not None and reply.num_bytes:
            self._rate.observe(reply.num_bytes / _bounded(reply.link_seconds))


class Line:
    """How fast a process's tensors arrive at the next stage, all together.

    The fastest of the last measurements counts, as in BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control",
    2016): a busy process at the other end only makes a line look slower.
    """

    def __init__(self) -> None:
        self._num_on_way = 0
        self._since = 0.0
        self._num_arrived = self._num_arrived_bytes = 0
        self._on_way_seconds = 0.0
        self._measured: deque[float] = deque(maxlen=_KEPT)

    @property
    def bytes_per_second(self) -> float:
        """The tensors of microbatches that have arrived, by the time in which any were on their way; 0 before that."""
        if self._measured:
            return max(self._measured)
        return self._num_arrived_bytes / self._on_way_seconds if self._on_way_seconds else 0.0

    def leaves(self, now: float) -> None:
        """Note that a microbatch's tensors are on their way."""
        self._since = self._since if self._num_on_way else now
        self._num_on_way += 1

    def arrives(self, num_bytes: int, now: float) -> None:
        """Note that they have arrived, or that they will not: then they are 0 bytes."""
        self._on_way_seconds, self._since = self._on_way_seconds + now - self._since, now
        self._num_on_way -= 1
        self._num_arrived_bytes += num_bytes
        self._num_arrived += num_bytes > 0
        if self._num_arrived == _TOGETHER and self._on_way_seconds:
            self._measured.append(self._num_arrived_bytes / self._on_way_seconds)
            self._num_arrived, self._num_arrived_bytes, self._on_way_seconds = 0, 0, 0.0


class SecondsPerSample:
    """One peer's expected seconds per sample: waiting in its queue, computing, and the link to it.

    The three times are added for this reason. Shares are in inverse proportion to the sum, so by Little's law an equal
    amount of our work is in flight at every peer. While queues are short, equal peers differ only by their links, and
    the nearer one gets more. A link costs no throughput as long as enough work is in flight. When the near peers are
    saturated, their queues grow until the far ones are as good. So no far peer stays unused. A full line to a peer acts
    like a queue: everything sent there takes longer, until the peer's share is what the line carries. If our own line
    is full, all peers seem equally far away, and get equal shares until queues form at the slower ones.
    """

    def __init__(self) -> None:
        self.observed = False
        """Whether a reply has come; until then only the peer's own announcement is known."""
        self._at_peer = MovingAverage(PEER_SMOOTHING)
        self._link = MovingAverage(PEER_SMOOTHING)
        self._observed_lately = False

    @property
    def expected(self) -> float | None:
        """Seconds per sample; None if the peer has neither announced a throughput nor answered yet."""
        at_peer = self._at_peer.value
        return None if at_peer is None else at_peer + (self._link.value or 0.0)

    def announced(self, record: PeerRecord, *, at_most: float) -> None:
        """Count a new announcement as one observation, unless there were replies since the last one. At most so many
        seconds count, so that no single value has an effect for long."""
        if record.samples_per_second > 0 and not self._observed_lately:
            queue_length = min(record.queue_length, _LONGEST_QUEUE)
            self._at_peer.observe(min(at_most, _bounded((1 + queue_length) / record.samples_per_second)))
        self._observed_lately = False

    def observe(self, reply: Observation, *, at_most: float) -> float | None:
        """Count a reply, bounded like announcements. Returns the seconds per sample that were counted; None if the
        reply is not typical."""
        if reply.busy_seconds is None:
            return None
        queue_length = min(reply.queue_length, _LONGEST_QUEUE)
        at_peer = min(at_most, _bounded((1 + queue_length) * reply.busy_seconds / reply.num_samples))
        self._at_peer.observe(at_peer)
        if reply.link_seconds is not None:
            self._link.observe(min(at_most, _bounded(reply.link_seconds / reply.num_samples)))
        self.observed = self._observed_lately = True
        return at_peer + (self._link.value or 0.0)


def _bounded(seconds: float) -> float:
    # In this order of the arguments, NaN becomes LONGEST_SECONDS.
    return max(SHORTEST_SECONDS, min(LONGEST_SECONDS, seconds))
