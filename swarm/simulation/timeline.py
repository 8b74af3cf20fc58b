"""Virtual time: what happens when, in order.

Used by every study that lets peers act. It is the clock of the real classes that run on it (swarm.machine.clock): the
time stands still while something happens and jumps to the next thing. Never waits, and never reads a real clock.
"""

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    """A heap of what is to happen. Of two things at the same time the one that was planned first comes first."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self._now

    def time(self) -> float:
        """The time of `monotonic`: all simulated machines agree on it."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Never called: what waits on this timeline is planned with `after`."""
        raise NotImplementedError

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Have something happen at a time, or at once if that is past."""
        heapq.heappush(self._events, (max(when, self._now), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Have something happen so much later."""
        self.at(self._now + seconds, action)

    def run(self, until: float) -> None:
        """Let everything happen up to a time; what is planned for later stays planned."""
        while self._events and self._events[0][0] <= until:
            self._now, _, action = heapq.heappop(self._events)
            action()
        self._now = until
