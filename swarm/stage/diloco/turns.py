"""Limits how far forwards run ahead of the inner steps that will use their gradients (DiLoCo).

Made by stage/diloco/setting; stage/computation takes a turn before a forward. A run learns less from a gradient that is
computed with older weights than those to which it is applied (docs/performance.md#learning). So a peer computes only as
many microbatches with the same weights as its next inner batches need, however many it has admitted. The others begin
as soon as a step is taken. Runs on the event loop; never computes.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable

from swarm.machine.clock import Clock
from swarm.routing.throughput import MovingAverage

LATE = 3.0
"""A turn that has taken this many times the usual seconds is late. Its microbatch may be waiting for a dead peer, for
example."""
SHORTEST_LATE_SECONDS = 1.0
"""No turn is late before this time."""
FIRST_LATE_SECONDS = 60.0
"""A turn is late after this time while no turn has ended yet, so that the usual time is unknown. It is less than
`HopLimits.stall_seconds`, after which callers take this peer for stalled."""
LOOK_SECONDS = 0.25
"""How often a waiting microbatch checks whether another one's turn has become late."""


class Turns:
    """Gives turns, older microbatches first.

    Args:
        most: the most microbatches that have begun their forward and whose gradients no step has used. Late ones are
            not counted, because they would hold up all others. Their gradients go into later steps.
        num_unstepped: gives the number of accumulated gradients that no step has used. It is less than `most` whenever
            no step can be taken before more gradients come.
    """

    def __init__(self, most: int, num_unstepped: Callable[[], int], clock: Clock) -> None:
        self._most = most
        self._num_unstepped = num_unstepped
        self._clock = clock
        self._began_at: dict[int, float] = {}
        """When each turn began."""
        self._usual_seconds = MovingAverage(0.1)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Microbatches that wait for a step."""
        return sum(not turn.done() for _, _, turn in self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, age: int) -> AsyncIterator[None]:
        """Wait for a turn and have it, until the gradient is accumulated or will never be.

        Args:
            age: of the microbatch; smaller is older.

        Cancellation gives the turn, or the place in the queue, to the next one.
        """
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (age, number, turn))
        try:
            self.look()
            while not turn.done():
                await asyncio.wait([turn], timeout=LOOK_SECONDS)
                self.look()
            yield
            self._usual_seconds.observe(self._clock.monotonic() - self._began_at[number])
        finally:
            turn.cancel()
            self._began_at.pop(number, None)
            self.look()

    def look(self) -> None:
        """Give as many turns as there is room for. To be called after every step, and when gradients were taken out."""
        while self._waiting and self._has_room():
            _, number, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._began_at[number] = self._clock.monotonic()
                turn.set_result(None)

    def _has_room(self) -> bool:
        return self._num_running() + self._num_unstepped() < self._most

    def _num_running(self) -> int:
        usual = self._usual_seconds.value
        late_seconds = FIRST_LATE_SECONDS if usual is None else max(SHORTEST_LATE_SECONDS, LATE * usual)
        late_since = self._clock.monotonic() - late_seconds
        return sum(began_at > late_since for began_at in self._began_at.values())
