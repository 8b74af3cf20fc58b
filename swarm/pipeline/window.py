"""How many microbatches a trainer keeps in flight.

Like a TCP window it grows while the swarm takes everything at once, and shrinks when peers answer Busy, so that a
trainer needs to know neither the swarm's size nor the links. Pure.
"""

MOST_IN_FLIGHT = 256
"""The most microbatches that a trainer has in flight, unless the user chooses another number."""
_LEAST_GROWTH = 1.0
"""The growth in the round trip after a Busy. It doubles with each round trip without a Busy, as another trainer may
have left."""
_DECREASE = 0.93
"""The factor by which a Busy shrinks the window. It is near 1: Busy from one of many peers says that this peer has
enough, not that all have."""


class Window:
    """A window that doubles in a round trip until a peer is busy; then it shrinks, and growth begins anew."""

    def __init__(self, *, start: int, largest: int) -> None:
        self._size = float(min(start, largest))
        self._largest = largest
        self._growth = self._size
        """By how many microbatches the window grows in a round trip."""
        self._num_older = 0
        """How many of the microbatches under way were in flight already when the window last shrank."""

    @property
    def size(self) -> int:
        """How many microbatches may be in flight."""
        return max(1, int(self._size))

    def finished(self, *, num_busy: int, in_flight: int) -> None:
        """Adapt the window to a microbatch that came back; `num_busy` is how often peers answered Busy, and `in_flight`
        how many are under way, this one included."""
        is_older = self._num_older > 0
        self._num_older = max(0, self._num_older - 1)
        if num_busy:
            self._growth = _LEAST_GROWTH
            # Microbatches that were refused together shrink the window once, not once each.
            if not is_older:
                self._size = max(1.0, self._size * _DECREASE)
                self._num_older = in_flight - 1
        elif in_flight >= self.size:
            # Only a full window has shown that it is not too large.
            share = 1.0 / self._size
            self._size = min(float(self._largest), self._size + self._growth * share)
            self._growth = min(self._size, self._growth * 2**share)
