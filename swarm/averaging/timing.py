"""The durations for which averaging waits. Tests use shorter ones."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations, all in seconds. Deadlines grow with measured times and double after a time-out."""

    report_gap_seconds: float = 0.05
    """Least time between two reports of progress."""
    heartbeat_seconds: float = 0.5
    """Longest time without a report. In an exchange, members also ping each other this often."""
    late_seconds: float = 1.0
    """A peer that stood still for this long has missed two heartbeats, so it asks all others where they stand."""
    report_seconds: float = 3.0
    """Deadline of a report and of a ping. A peer that misses it is suspected, or its exchange fails."""
    call_seconds: float = 2.0
    """Deadline of a call to a peer that has missed a report, is suspected, or was cut off."""
    reconnect_seconds: float = 1.0
    """Deadline of a report on a new connection, after the former one broke within this time."""
    fresh_seconds: float = 3.5
    """Age up to which a report counts its sender as a member."""
    missed_seconds: float = 20.0
    """A member that has been silent for this long is not expected back soon. The others no longer wait for what it
    holds."""
    probe_seconds: float = 0.5
    """Time between two calls to a suspected peer, at first."""
    forget_seconds: float = 3600.0
    """A peer is forgotten if it is not announced and gave no sign of life for this long."""
    exclusion_seconds: float = 5.0
    """How long a member that made an exchange fail is left out, the first time."""
    max_exclusion_seconds: float = 60.0
    """Longest time for which a member is left out."""
    begin_seconds: float = 3.0
    """Least time that a member may take for one piece of closing its contribution."""
    closing_seconds: float = 1.0
    """After this time a member that is still closing answers with its progress."""
    max_closing_seconds: float = 300.0
    """Longest time for closing, whatever a member reports; after that it is left out at once."""
    work_bytes_per_second: float = 5e7
    """The others do not wait for a machine that copies, encodes or applies more slowly than this."""
    average_seconds: float = 10.0
    """Least deadline for an exchange."""
    bytes_per_second: float = 1e6
    """An exchange does not wait for a line that is slower than this."""
    commit_seconds: float = 10.0
    """Least deadline for applying a result."""
    grace_seconds: float = 0.5
    """After a first failure, the other members have this long to answer which member they blame."""
    barrier_seconds: float = 2.0
    """How long another stage may hold a barrier request while it waits for its own result."""
    awaited_seconds: float = 20.0
    """With DiLoCo: after another stage has waited this long for a round of this stage, the round ends with what it
    has."""
    shared_seconds: float = 60.0
    """How long a member goes on asking for another stage's average of a shared block."""
    silence_seconds: float = 15.0
    """Longest wait for the next piece of a snapshot, or of an exchange."""
    retry_seconds: float = 0.2
    """Wait before another stage is asked again, and before the second repetition of an attempt."""
    max_retry_seconds: float = 5.0
    """Longest wait between two attempts."""
