"""Virtual time: planned actions run in the order of their times. It is the clock of the real classes on it."""

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    """A heap of planned actions. Of two actions at the same time, the one that was planned first comes first."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Raise NotImplementedError: code on this timeline plans its next action with `after` and never sleeps."""
        raise NotImplementedError

    def at(self, when: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(when, self._now), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self._now + seconds, action)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, action = heapq.heappop(self._events)
            action()
        self._now = until
