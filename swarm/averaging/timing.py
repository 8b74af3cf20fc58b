"""How long averaging waits for what; tests wait for less time than machines far apart."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations, all in seconds. Deadlines grow with measured times and double after a time-out."""

    report_gap_seconds: float = 0.05
    """Least time between two reports of progress."""
    heartbeat_seconds: float = 0.5
    """Longest time without a report; in an exchange, members ask each other for a sign of life equally often."""
    late_seconds: float = 1.0
    """A peer that stood still for this long asks all others where they stand: it has missed two heartbeats."""
    report_seconds: float = 3.0
    """Deadline of a report, and of a sign of life; a peer that misses it is suspected, or its exchange fails."""
    call_seconds: float = 2.0
    """Deadline of a call to a peer that has missed a report already, is suspected, or was cut off."""
    reconnect_seconds: float = 1.0
    """Deadline of a report on a new connection, after the former one broke within this time."""
    fresh_seconds: float = 3.5
    """Age up to which a report counts its sender as a member."""
    missed_seconds: float = 20.0
    """A member that has been silent for this long will not be back soon, and what it holds is no longer waited for."""
    probe_seconds: float = 0.5
    """Time between two calls to a suspected peer, at first."""
    forget_seconds: float = 3600.0
    """A peer that is not announced and was not heard of for this long is forgotten."""
    exclusion_seconds: float = 5.0
    """How long a member that made an exchange fail is left out, the first time."""
    max_exclusion_seconds: float = 60.0
    """Longest time for which a member is left out."""
    begin_seconds: float = 3.0
    """How long, at least, a member that closes its contribution may take for one piece of that work."""
    closing_seconds: float = 1.0
    """After this time a member that is still closing reports how it gets on."""
    max_closing_seconds: float = 300.0
    """Longest time for closing, whatever a member reports; after that it is left out at once."""
    work_bytes_per_second: float = 5e7
    """A machine that copies, encodes or applies more slowly than this is not waited for."""
    average_seconds: float = 10.0
    """Least deadline for an exchange."""
    bytes_per_second: float = 1e6
    """An exchange does not wait for a line that is slower than this."""
    commit_seconds: float = 10.0
    """Least deadline for applying a result."""
    grace_seconds: float = 0.5
    """How long the other members have, after a first failure, to say which member they think caused it."""
    barrier_seconds: float = 2.0
    """How long another stage may wait for its result before it answers a barrier request."""
    awaited_seconds: float = 20.0
    """With DiLoCo: how long another stage may wait for a round of this one, before the round ends with what it has."""
    shared_seconds: float = 60.0
    """For how long a member asks for another stage's average of a shared block."""
    silence_seconds: float = 15.0
    """Longest wait for the next piece of a snapshot, or of an exchange."""
    retry_seconds: float = 0.2
    """Wait before another stage is asked again, and before the second repetition of an attempt."""
    max_retry_seconds: float = 5.0
    """Longest wait between two attempts."""
