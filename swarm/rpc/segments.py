"""Numbered segments that several workers share out, so that each segment is fetched once.

Used by content and by averaging/catching_up. A segment that one worker fails to fetch comes back for the others.
"""

import asyncio
from collections import deque
from collections.abc import Iterable


class Segments:
    """The segments that are missing.

    Attributes:
        num_missing: how many are missing, including those that are being fetched.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._queue = deque(numbers)
        self.num_missing = len(self._queue)
        self._flying: set[int] = set()
        self._changed = asyncio.Event()

    async def take(self) -> int | None:
        """Take a segment, which this caller alone then fetches; None once all are here.

        Waits while others fetch the last ones, since a segment that they fail to fetch comes back.
        """
        while not self._queue and self._flying:
            self._changed.clear()
            await self._changed.wait()
        if not self._queue:
            return None
        index = self._queue.popleft()
        self._flying.add(index)
        return index

    def finish(self, index: int) -> None:
        """Note that a segment is here."""
        self._flying.discard(index)
        self.num_missing -= 1
        self._changed.set()

    def give_back(self, index: int) -> None:
        """Note that the worker which took a segment is done with it: if it is not here, others may take it."""
        if index in self._flying:
            self._flying.discard(index)
            self._queue.appendleft(index)
            self._changed.set()
