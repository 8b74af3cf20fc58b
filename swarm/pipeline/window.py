"""How many microbatches a trainer keeps in flight.

Grows while the swarm takes everything at once, shrinks when peers answer Busy: like a TCP window, so that a
trainer needs no knowledge of the swarm's size or of the links. Pure.
"""

_GROWTH = 1.0
_DECREASE = 0.85


class Window:
    """An additive-increase, multiplicative-decrease window."""

    def __init__(self, *, start: int, largest: int) -> None:
        self._size = float(start)
        self._largest = largest

    @property
    def size(self) -> int:
        """Microbatches that may be in flight."""
        return max(1, int(self._size))

    def finished(self, *, num_busy: int, in_flight: int) -> None:
        """A microbatch came back; `num_busy` of its hops from here were answered Busy."""
        if num_busy:
            self._size = max(1.0, self._size * _DECREASE)
        elif in_flight >= self.size:
            # Only a full window has shown that it is not too large.
            self._size = min(float(self._largest), self._size + _GROWTH / self._size)
