"""How long anything is waited for in a group: durations, and deadlines. An exchange ends after `deadline_seconds`, for
which `Timing.exchange_seconds` is the floor. A member fails in it earlier: if nothing of its contribution comes for
`Timing.exchange_silence_seconds`, or if that is not complete after OWNER_PATIENCE of the exchange's time."""

from dataclasses import dataclass

from swarm.rpc.bounds import CHUNK_BYTES

OWNER_PATIENCE = 0.8
"""The share of an exchange's time after which an owner blames the member that it still waits for. It must come before
the end, because the others wait for the owner and then blame the owner. In a gather every member is like an owner."""
MOST_DOUBLINGS = 3


def deadline_seconds(floor_seconds: float, last_seconds: float, num_timeouts: int) -> float:
    """For a step that took `last_seconds` the last time. Each time-out in a row doubles it, MOST_DOUBLINGS times."""
    return (floor_seconds + 3 * last_seconds) * float(2 ** min(MOST_DOUBLINGS, num_timeouts))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations, all in seconds."""

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
    takeover_seconds: float = 3.5
    """With DiLoCo: how long a peer waits that takes the lead over, so that all members have time to report to it."""
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
    look_seconds: float = 10.0
    """Time between two looks of a member at what all others have of an old round."""
    idle_seconds: float = 60.0
    """A leader that begins no attempt at a whole round for so long is passed over."""
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
    """After a failure, the other members have this long to answer which member they blame. The time begins again with
    each further answer."""
    barrier_seconds: float = 2.0
    """How long another stage may hold a barrier request while it waits for its own result."""
    awaited_seconds: float = 20.0
    """With DiLoCo: after another stage has waited this long for a round of this stage, the round ends with what it
    has."""
    shared_seconds: float = 60.0
    """How long a member goes on asking for another stage's average of tied parameters."""
    silence_seconds: float = 15.0
    """Longest wait for the next piece of a snapshot, or of an exchange."""
    retry_seconds: float = 0.2
    """Wait before another stage is asked again, and before the second repetition of an attempt."""
    max_retry_seconds: float = 5.0
    """Longest wait between two attempts."""

    def exchange_seconds(self, num_bytes: float) -> float:
        """The least deadline for an exchange in which so many bytes pass over one line."""
        return self.average_seconds + num_bytes / self.bytes_per_second

    def exchange_silence_seconds(self, num_members: int, vector_bytes: int) -> float:
        """The silence after which one of so many members counts as failed. It sends to all owners in turn, over a slow
        line, and has to encode a whole vector before its first message, on a slow processor."""
        turn_seconds = num_members * CHUNK_BYTES / self.bytes_per_second
        return self.silence_seconds + turn_seconds + vector_bytes / self.work_bytes_per_second

    def applying_seconds(self, num_bytes: int) -> float:
        """The least deadline for applying a result of so many bytes."""
        return self.commit_seconds + num_bytes / self.work_bytes_per_second

    def busy_seconds(self, num_bytes: int) -> float:
        """How long a leader may be busy with attempts at a whole round: the longest closings, and slow exchanges."""
        return 2 * self.max_closing_seconds + 8 * self.exchange_seconds(4 * num_bytes)
