"""How many microbatches a trainer keeps in flight.

Grows while the swarm takes everything at once, shrinks when peers answer Busy: like a TCP window, so that a
trainer needs no knowledge of the swarm's size or of the links. Pure.
"""

MOST_IN_FLIGHT = 256
"""The most microbatches in flight of a trainer that is told nothing else."""
_LEAST_GROWTH = 1.0
"""The growth in the round trip after a Busy. It doubles with each round trip without one: another trainer may have
left."""
_DECREASE = 0.93
"""Little: Busy from one of many peers says that this one has enough, not that all have."""


class Window:
    """A window that doubles in a round trip until a peer is busy; then it shrinks, and growth begins anew."""

    def __init__(self, *, start: int, largest: int) -> None:
        self._size = float(min(start, largest))
        self._largest = largest
        self._growth = self._size
        """By how many microbatches the window grows in a round trip."""
        self._num_older = 0
        """Microbatches to come that were in flight at the last decrease already."""

    @property
    def size(self) -> int:
        """Microbatches that may be in flight."""
        return max(1, int(self._size))

    def finished(self, *, num_busy: int, in_flight: int) -> None:
        """A microbatch came back; `num_busy` of its hops from here were answered Busy.

        Args:
            in_flight: microbatches under way, this one included.
        """
        is_older = self._num_older > 0
        self._num_older = max(0, self._num_older - 1)
        if num_busy:
            self._growth = _LEAST_GROWTH
            # Those that were refused together are one sign, not many.
            if not is_older:
                self._size = max(1.0, self._size * _DECREASE)
                self._num_older = in_flight - 1
        elif in_flight >= self.size:
            # Only a full window has shown that it is not too large.
            share = 1.0 / self._size
            self._size = min(float(self._largest), self._size + self._growth * share)
            self._growth = min(self._size, self._growth * 2**share)
