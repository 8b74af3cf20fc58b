"""Time as an argument, so that tests and the simulator can replace it, and tasks and waits that end in time.

Wall-clock time appears only in what people read, and where machines have to agree on it (the expiry of DHT records).
The clock goes on while the machine sleeps, and so does the time of event loops. So a laptop that slept is like a
process that was stopped. Only a wait that was under way when the machine fell asleep goes on for the rest of its time.
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import uvloop

from swarm.errors import NotReady

Result = TypeVar("Result")

JUMP_SECONDS = 2.0
"""A wall clock that moves by more than this against the monotonic one has been set."""
DOUBT_SECONDS = 30.0
"""A clock that was set is not trusted for this long, because many are soon set back."""


def clock_through_sleep(platform: str, clocks: Mapping[str, Any]) -> Callable[[], float]:
    """The monotonic clock of a platform (`sys.platform`) that goes on while the machine sleeps.

    While the machine sleeps, Python's time.monotonic stands still on Linux (CLOCK_MONOTONIC, see clock_gettime(2)) and
    on macOS (mach_absolute_time), and goes on under Windows. Linux has CLOCK_BOOTTIME for this, and macOS
    mach_continuous_time, which its clock_gettime(3) calls CLOCK_MONOTONIC_RAW. (The Linux clock of that name stands
    still.) `clocks` are the names in Python's module `time` on this platform.
    """
    name = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC_RAW"}.get(platform)
    if name is None or name not in clocks:
        return time.monotonic
    clock_id = clocks[name]
    return lambda: time.clock_gettime(clock_id)


monotonic = clock_through_sleep(sys.platform, vars(time))
"""This machine's monotonic clock, in seconds."""


class Loop(uvloop.Loop):
    """The event loop of all programs: uvloop's, which takes less processor time for a message than Python's own.

    Its time is that of SystemClock. But libuv's timers, which are set for a number of seconds from now, stand still
    while the machine sleeps.
    """

    def time(self) -> float:
        return monotonic()


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)


class Clock(Protocol):
    """A source of time in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""

    def time(self) -> float:
        """Seconds since the epoch, by the machine's wall clock."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`. Cancellation ends the wait at once."""


class SystemClock:
    def monotonic(self) -> float:
        return monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SteadyTime:
    """Wall-clock time that follows a jump of the machine's clock only after DOUBT_SECONDS. Only `now` notices jumps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen = self._offset = clock.time() - clock.monotonic()
        self._jumped_at = -math.inf

    def now(self) -> float:
        monotonic = self._clock.monotonic()
        offset = self._clock.time() - monotonic
        if abs(offset - self._seen) > JUMP_SECONDS:
            self._jumped_at = monotonic
        self._seen = offset
        if monotonic - self._jumped_at >= DOUBT_SECONDS:
            self._offset = offset
        return monotonic + self._offset

    @property
    def is_in_doubt(self) -> bool:
        """Whether `now` has seen the clock jump within the last DOUBT_SECONDS, so that nothing counts as expired."""
        return self._clock.monotonic() - self._jumped_at < DOUBT_SECONDS


def spawn(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task of the group. This fails for a call that is still ending when the group has ended. Raises NotReady
    if the group has ended, and `work` will never run."""
    try:
        return tasks.create_task(work)
    except RuntimeError:
        # Closed, because the garbage collector would later report a coroutine that was never awaited.
        work.close()
        raise NotReady("this peer is stopping") from None


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
