"""How long peers stay in a run, as far as one peer has seen.

Used by judgement: a move has to pay off within this time. Pure.
"""

from collections.abc import Set

from swarm.types import PeerId

PRIOR_SECONDS = 3600.0
"""The stay that is assumed at first, as if one peer had been watched for this long and had then left."""


class Stays:
    """Counts from look to look which peers are there, and for how long."""

    def __init__(self) -> None:
        self._present: Set[PeerId] = frozenset()
        self._seen_at: float | None = None
        self._peer_seconds = PRIOR_SECONDS
        self._num_departures = 1

    def look(self, present: Set[PeerId], now: float) -> None:
        """Take note of the peers that are there, those on their way to another stage included.

        Args:
            now: seconds, of a clock that never goes back.
        """
        if self._seen_at is not None:
            self._peer_seconds += len(self._present) * (now - self._seen_at)
            self._num_departures += len(self._present - present)
        self._present, self._seen_at = present, now

    @property
    def mean_seconds(self) -> float:
        """The mean time that a peer stays."""
        return self._peer_seconds / self._num_departures
