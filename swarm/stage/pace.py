"""How far forwards may run ahead of the inner steps that will use their gradients (DiLoCo).

Used by stage/stage, which makes it, and by stage/computation, which takes a turn before a forward. A gradient that is
computed with older weights than those it is applied to teaches less: with Adam, one step of delay costs a fifth of what
is learnt at first (scripts/bench learning). So a peer computes with the same weights no more microbatches than make its
next inner batches, however many it has admitted; those that wait begin as soon as a step is taken. Runs on the event
loop; never computes.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable


class Pace:
    """Gives turns, older microbatches first.

    Args:
        most: microbatches whose forward has begun and whose gradient no step has used; None: any number.
        num_unstepped: tells how many gradients are accumulated that no step has used.
    """

    def __init__(self, most: int | None, num_unstepped: Callable[[], int]) -> None:
        self._most = most
        self._num_unstepped = num_unstepped
        self._num_running = 0
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
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (age, next(self._numbers), turn))
        self.look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end()
            raise
        try:
            yield
        finally:
            self._end()

    def look(self) -> None:
        """Give turns for which there is room; to be called after every step, and when gradients were taken out."""
        while self._waiting and (self._most is None or self._num_running + self._num_unstepped() < self._most):
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._num_running += 1
                turn.set_result(None)

    def _end(self) -> None:
        self._num_running -= 1
        self.look()
