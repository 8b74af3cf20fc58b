"""How patient averaging is; tests have less patience than machines far apart."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations, all in seconds. Deadlines grow with measured times and double after a time-out."""

    report_gap_seconds: float = 0.05
    """Least time between two reports of progress."""
    heartbeat_seconds: float = 0.5
    """Longest time without a report; members of an exchange ask each other for a sign of life as often."""
    late_seconds: float = 1.0
    """A peer that stood still for so long asks the others anew: one that missed two heartbeats counts as silent."""
    report_seconds: float = 3.0
    """Deadline of a report, and of a sign of life; a peer that misses it is suspected, or its exchange fails."""
    call_seconds: float = 2.0
    """Deadline of a call to a peer that has missed a report already, is suspected, or was cut off."""
    reconnect_seconds: float = 1.0
    """Deadline of a report on a new connection, where the one before broke sooner than that."""
    fresh_seconds: float = 3.5
    """Age up to which a report counts its sender as a member."""
    missed_seconds: float = 20.0
    """A member that has been silent for so long will not be back soon: nothing waits for what it holds any more."""
    probe_seconds: float = 0.5
    """Time between two calls to a suspected peer, at first."""
    forget_seconds: float = 3600.0
    """A peer that is not announced and was not heard of for so long is forgotten."""
    exclusion_seconds: float = 5.0
    """How long a member that made an exchange fail is left out, the first time."""
    max_exclusion_seconds: float = 60.0
    """Longest time for that."""
    begin_seconds: float = 3.0
    """Least time for which a member that closes its contribution may finish no piece of that work."""
    closing_seconds: float = 1.0
    """After so long a member that is still closing says how it gets on."""
    max_closing_seconds: float = 300.0
    """Longest time for closing, whatever a member says: then it is left out at once."""
    work_bytes_per_second: float = 5e7
    """The slowest machine that is waited for while it copies, encodes or applies what it holds."""
    average_seconds: float = 10.0
    """Least deadline for an exchange."""
    bytes_per_second: float = 1e6
    """The slowest line an exchange waits for."""
    commit_seconds: float = 10.0
    """Least deadline for applying a result."""
    grace_seconds: float = 0.5
    """How long others have time, after a first failure, to say what they think the cause was."""
    barrier_seconds: float = 2.0
    """How long another stage may hold its answer back."""
    awaited_seconds: float = 20.0
    """How long another stage may wait for one of DiLoCo's rounds before it ends with what it has."""
    shared_seconds: float = 60.0
    """How long another stage's average of a shared block is asked for."""
    silence_seconds: float = 15.0
    """Longest wait for the next piece of a snapshot, or of an exchange."""
    retry_seconds: float = 0.2
    """Wait before asking another stage again, and before the first repeated attempt but one."""
    max_retry_seconds: float = 5.0
    """Longest wait between two attempts."""
