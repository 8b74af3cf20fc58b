"""How a peer that is behind its group gets on: how many rounds it lacks, and whether these become fewer.

Used by catching_up/replay, while the group commits more. Pure.
"""

from dataclasses import dataclass

LEAST_SECONDS = 5.0
"""Nothing is concluded from a shorter time: rounds come in bursts."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a peer and its group were.

    Attributes:
        at: the time in seconds, by the peer's clock.
        own_round: the round that the peer had come to.
        group_round: the one that its group was in, as far as the peer had been told.
    """

    at: float
    own_round: int
    group_round: int

    @property
    def num_behind(self) -> int:
        """Rounds that the peer lacks."""
        return max(0, self.group_round - self.own_round)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Two positions of the same peer, the first one and the newest."""

    first: Position
    newest: Position

    @property
    def seconds(self) -> float:
        """The seconds between the two."""
        return self.newest.at - self.first.at

    @property
    def num_replayed(self) -> int:
        """Rounds that the peer has replayed meanwhile."""
        return self.newest.own_round - self.first.own_round

    @property
    def num_committed(self) -> int:
        """Rounds that the group has committed meanwhile."""
        return self.newest.group_round - self.first.group_round

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
        return self.newest.num_behind * self.seconds / closer
