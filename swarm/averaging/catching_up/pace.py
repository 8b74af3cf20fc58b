"""How a peer that is behind its group gets on: how many rounds it lacks, and whether these become fewer.

Used by catching_up/replay, while the group commits more. Pure.
"""

from dataclasses import dataclass

LEAST_SECONDS = 5.0
"""Nothing is concluded from a shorter time: rounds come in bursts."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a peer has got on for a while.

    Attributes:
        seconds: for how long.
        num_replayed: rounds that the peer has replayed meanwhile.
        num_committed: rounds that its group has committed meanwhile, as far as the peer was told.
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
        """Whether the peer comes no closer."""
        return self.seconds >= LEAST_SECONDS and self.num_committed >= self.num_replayed > 0

    @property
    def seconds_left(self) -> float | None:
        """The time until the peer arrives, if it goes on like that; None if that cannot be told."""
        closer = self.num_replayed - self.num_committed
        if self.seconds < LEAST_SECONDS or closer <= 0:
            return None
        return self.num_behind * self.seconds / closer
