"""The progress of a peer that is behind its group: how many rounds it lacks, and whether that number falls.

Used by catching_up/replay, while the group commits more. Pure.
"""

from dataclasses import dataclass

LEAST_SECONDS = 5.0
"""Nothing is concluded from a shorter time, because rounds come in bursts."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A peer's progress over some time.

    Attributes:
        seconds: the length of that time.
        num_replayed: rounds that the peer replayed in that time.
        num_committed: rounds that its group committed in that time, as far as the peer knows.
        num_behind: rounds that the peer lacks now.
    """

    seconds: float
    num_replayed: int
    num_committed: int
    num_behind: int

    @property
    def is_losing(self) -> bool:
        """Whether the group commits rounds faster than the peer replays them."""
        return self.seconds >= LEAST_SECONDS and self.num_committed > self.num_replayed > 0

    @property
    def stands_still(self) -> bool:
        """Whether the peer comes no closer to its group."""
        return self.seconds >= LEAST_SECONDS and self.num_committed >= self.num_replayed > 0

    @property
    def seconds_left(self) -> float | None:
        """The time until the peer arrives at its present pace; None if that is not known."""
        closer = self.num_replayed - self.num_committed
        if self.seconds < LEAST_SECONDS or closer <= 0:
            return None
        return self.num_behind * self.seconds / closer
