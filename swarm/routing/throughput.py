"""How long a peer is expected to take over one sample.

Kept for every peer by the stage's queue (swarm.routing.peer_queue). What peers say about themselves is
bounded, never trusted: nonsense counts as slow. Never reads a clock.
"""

from dataclasses import dataclass

from swarm.types import PeerRecord

PEER_SMOOTHING = 0.2
"""Weight of a peer's newest observation: some five of them are remembered."""

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-6, 1e6
"""Every reading lies in between. Never zero: a peer that costs nothing would be chosen for ever."""

_LONGEST_QUEUE = 1000
"""Peers may announce integers of any size."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a reply tells of its peer."""

    num_samples: int
    busy_seconds: float | None
    """The peer's own computing for these samples, forward and backward, as it reports it: the time of the whole call
    has everything downstream in it. None if it says nothing about others."""
    link_seconds: float | None
    """What the link added, from the first byte sent to the word that all have arrived; None if nothing was sent."""
    round_trip_seconds: float | None = None
    """The time from a request of a few bytes to its answer; None if there was no such request."""
    num_bytes: int = 0
    """The bytes that were sent in `link_seconds`."""
    queue_length: int
    """Tasks that wait at the peer. A forward or a backward is a task, half of a microbatch's work, and a microbatch
    waits for both: so each waiting task costs one `busy_seconds`."""


class MovingAverage:
    """Exponential moving average, corrected for its start: the first observation counts in full."""

    def __init__(self, smoothing: float) -> None:
        self._keep = 1.0 - smoothing
        self._total = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float | None:
        """The average; None before the first observation."""
        return self._total / self._weight if self._weight else None

    def observe(self, value: float) -> None:
        self._total = self._keep * self._total + value
        self._weight = self._keep * self._weight + 1.0


class Link:
    """The line to one peer, for people."""

    def __init__(self) -> None:
        self._round_trip = MovingAverage(PEER_SMOOTHING)
        self._rate = MovingAverage(PEER_SMOOTHING)

    @property
    def round_trip_seconds(self) -> float | None:
        """The mean round-trip time of late; None before the first."""
        return self._round_trip.value

    @property
    def bytes_per_second(self) -> float | None:
        """The rate at which tensors went there of late, their round trip included; None before the first."""
        return self._rate.value

    def observe(self, reply: Observation) -> None:
        """Learn from a reply."""
        if reply.round_trip_seconds is not None:
            self._round_trip.observe(_bounded(reply.round_trip_seconds))
        if reply.link_seconds is not None and reply.num_bytes:
            self._rate.observe(reply.num_bytes / _bounded(reply.link_seconds))


class SecondsPerSample:
    """One peer's expected seconds per sample: waiting in its queue, computing, and the link to it.

    Why the sum: by Little's law, shares in inverse proportion to the time that a sample spends with a peer
    keep equally much of our work in flight at every peer. While queues are short, equal peers differ by their
    links and the nearer one gets more. A link costs no throughput as long as enough is in flight, and when the
    near peers are saturated their queues grow until the far ones look as good: no capacity is left unused for
    being far away. A line that is full has a queue too, though the peer behind it knows of none: what is sent at once
    takes longer, all of it, until the peer's share is what the line carries. Where it is our own line that is full,
    everybody is as far away, and gets alike until there is a queue at the slower ones.
    """

    def __init__(self) -> None:
        self.observed = False
        """Whether there was a reply: until then there is only the peer's word."""
        self._at_peer = MovingAverage(PEER_SMOOTHING)
        self._link = MovingAverage(PEER_SMOOTHING)
        self._observed_lately = False

    @property
    def expected(self) -> float | None:
        """Seconds per sample; None if the peer has neither announced a throughput nor answered yet."""
        at_peer = self._at_peer.value
        return None if at_peer is None else at_peer + (self._link.value or 0.0)

    def announced(self, record: PeerRecord, *, at_most: float) -> None:
        """Count a new announcement as one observation, unless there were replies since the last one.

        Args:
            at_most: seconds per sample; anything longer counts as this, so that no single value is felt for long.
        """
        if record.samples_per_second > 0 and not self._observed_lately:
            queue_length = min(record.queue_length, _LONGEST_QUEUE)
            self._at_peer.observe(min(at_most, _bounded((1 + queue_length) / record.samples_per_second)))
        self._observed_lately = False

    def observe(self, reply: Observation, *, at_most: float) -> float | None:
        """Count a reply; gives the seconds per sample that were counted, None if it says nothing about others.

        Args:
            at_most: as in `announced`.
        """
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
    # In this order NaN ends as the longest.
    return max(SHORTEST_SECONDS, min(LONGEST_SECONDS, seconds))
