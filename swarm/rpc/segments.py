"""Numbered segments that come from several sources at once, each segment from one of them.

A segment that one source fails to send comes back for the others.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from swarm.errors import Overloaded, SwarmError
from swarm.machine.arriving import Arriving
from swarm.machine.clock import Clock

MAX_SOURCES = 4
"""The most peers that are asked, and send, at the same time."""
PATIENCE_SECONDS = 3600.0
"""How long a source that serves others first is waited for."""
LONGEST_RETRY_SECONDS = 5.0


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

    async def fetch_from(
        self,
        source: str,
        fetch: Callable[[int], Awaitable[None]],
        clock: Clock,
        arriving: Arriving | None = None,
        *,
        gives_way: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fetch from one source until all segments are here.

        Args:
            source: its name, for people.
            fetch: fetches and keeps one segment.
            gives_way: tells whether a source that serves others first is to be left.

        Raises:
            Overloaded: the source served others first, and was left for that.
            SwarmError: the source failed.
        """
        given_at = clock.monotonic()
        while (index := await self.take()) is not None:
            pause_seconds = 0.0
            try:
                await fetch(index)
                self.finish(index)
                given_at = clock.monotonic()
            except Overloaded as error:
                # Another source may send this segment meanwhile.
                if gives_way() or clock.monotonic() - given_at >= PATIENCE_SECONDS:
                    raise
                if arriving is not None:
                    arriving.held_up(source, str(error))
                pause_seconds = min(error.retry_after_seconds, LONGEST_RETRY_SECONDS)
            except SwarmError:
                if arriving is not None:
                    arriving.lost(source)
                raise
            finally:
                self.give_back(index)
            await clock.sleep(pause_seconds)
