"""Numbered segments that come from several sources at once, and how much of a download has arrived."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from swarm.errors import Overloaded, SwarmError
from swarm.machine.clock import Clock

MAX_SOURCES = 4
"""The most peers that are asked, and send, at the same time."""
PATIENCE_SECONDS = 3600.0
"""How long a source that serves others first is waited for."""
LONGEST_RETRY_SECONDS = 5.0


@dataclass(eq=False)
class Arriving:
    what: str
    """Names the download, for people."""
    num_bytes: int
    """How many bytes the whole download has."""
    num_arrived: int = field(default=0, init=False)
    """How many bytes have come."""
    _spans: list[tuple[float, float]] = field(default_factory=list, init=False)
    """The spans of time in which a source was sending."""
    _num_timed: int = field(default=0, init=False)
    """How many bytes came in these spans."""
    _sources: dict[str, str] = field(default_factory=dict, init=False)
    """For each source, why it sends nothing now; empty if it sends."""

    def add(self, num_bytes: int, source: str) -> None:
        self.num_arrived += num_bytes
        self._sources[source] = ""

    def timed(self, num_bytes: int, began_at: float, ended_at: float) -> None:
        """Note that a source sent `num_bytes` without a pause; the times are seconds of any clock."""
        self._num_timed += num_bytes
        self._spans.append((began_at, ended_at))

    @property
    def bytes_per_second(self) -> float:
        """The rate while at least one source was sending; infinite if that took no measurable time."""
        return self._num_timed / self.sending_seconds if self.sending_seconds > 0.0 else math.inf

    @property
    def sending_seconds(self) -> float:
        """The seconds in which at least one source was sending; pauses, and waits for a turn, are left out."""
        total, until = 0.0, -math.inf
        for begin, end in sorted(self._spans):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    def held_up(self, source: str, reason: str) -> None:
        """Note that a source will send, but not yet, and why."""
        self._sources[source] = reason

    def lost(self, source: str) -> None:
        self._sources.pop(source, None)

    def in_words(self, seconds: float) -> str:
        """How far the download is `seconds` after it began, in words."""
        rate = self.num_arrived / max(seconds, 1e-3)
        # Segments that did not match are fetched again, so more bytes may come than the download has.
        arrived = min(self.num_arrived, self.num_bytes)
        sources = ", ".join(f"{name} ({why})" if why else name for name, why in self._sources.items())
        source = f" from {sources}" if sources else ""
        left = f", {(self.num_bytes - arrived) / rate:.0f} s left" if rate and seconds >= 1.0 else ""
        of = f"{arrived / 1e6:,.1f} of {self.num_bytes / 1e6:,.1f} MB"
        return f"{self.what}: {of}{source}, {rate / 1e6:,.2f} MB/s{left}"


class Segments:
    """The segments that are missing."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._queue = deque(numbers)
        self.num_missing = len(self._queue)
        """How many are missing, including those that are being fetched."""
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
        """Fetch from one source, which is named for people, until all segments are here. `fetch` fetches and keeps one
        segment; `gives_way` tells whether a source that serves others first is to be left.

        Raises Overloaded if the source served others first, and was left for that; another SwarmError if it failed.
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
