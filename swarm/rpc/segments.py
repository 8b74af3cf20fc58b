"""Numbered segments of which several workers fetch each one once.

Used by content and by averaging/catching_up. A segment that one worker fails to fetch comes back for the others.
"""

import asyncio
from collections import deque
from collections.abc import Iterable


class Segments:
    """The segments that are missing.

    Attributes:
        num_missing: how many are missing, those included that are being fetched.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._queue = deque(numbers)
        self.num_missing = len(self._queue)
        self._flying: set[int] = set()
        self._changed = asyncio.Event()

    async def take(self) -> int | None:
        """A segment that this caller alone fetches; None when all are here. A segment that others fail to fetch comes
        back."""
        while not self._queue and self._flying:
            self._changed.clear()
            await self._changed.wait()
        if not self._queue:
            return None
        index = self._queue.popleft()
        self._flying.add(index)
        return index

    def finish(self, index: int) -> None:
        """A segment is here."""
        self._flying.discard(index)
        self.num_missing -= 1
        self._changed.set()

    def give_back(self, index: int) -> None:
        """The worker that took a segment is done with it. If it is not here, another one may take it."""
        if index in self._flying:
            self._flying.discard(index)
            self._queue.appendleft(index)
            self._changed.set()
