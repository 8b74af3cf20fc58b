"""Windows: how many microbatches of each path a trainer keeps in flight."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

_LEAST_GROWTH = 1.0
"""The growth in the round trip after a Busy. It doubles with each round trip without a Busy, as another trainer may
have left."""
_DECREASE = 0.93
"""The factor by which a Busy shrinks the window. It is near 1: Busy from one of many peers says that this peer has
enough, not that all have."""


class Window:
    """How many microbatches a trainer keeps in flight: as many as the swarm takes, so that a trainer needs to know
    neither the swarm's size nor the links. Like a TCP window it doubles in a round trip until a peer is busy; then it
    shrinks, and growth begins anew."""

    def __init__(self, *, start: int, largest: int) -> None:
        self._size = float(min(start, largest))
        self._largest = largest
        self._growth = self._size
        """By how many microbatches the window grows in a round trip."""
        self._num_older = 0
        """How many of the microbatches under way were in flight already when the window last shrank."""

    @property
    def size(self) -> int:
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


class Windows:
    """A window for each path, so that a path which is busy or stands still takes no room from the others."""

    def __init__(self, paths: Sequence[int], *, num_stages: int, max_in_flight: int) -> None:
        largest = max(1, max_in_flight // len(paths))
        self._windows = {path: Window(start=2 * num_stages, largest=largest) for path in paths}

    def size(self, path: int) -> int:
        return self._windows[path].size

    def finished(self, path: int, *, num_busy: int, in_flight: int) -> None:
        """Adapt a path's window; see Window.finished. `in_flight` are those of the path."""
        self._windows[path].finished(num_busy=num_busy, in_flight=in_flight)

    def wish(self, paths: Iterable[int], held: Counter[int], *, ahead: float = 0.0) -> list[int]:
        """Those of the paths of which more microbatches are wanted than are held, each as often as more are, in turns:
        what fills the window, and a share `ahead` of it besides."""
        room = {path: self.size(path) + math.ceil(ahead * self.size(path)) - held[path] for path in paths}
        most = max(room.values(), default=0)
        return [path for number in range(most) for path in room if number < room[path]]
