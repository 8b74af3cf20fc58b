"""Time as an argument, so that tests and the simulator can own it.

Everything that waits or measures takes a `Clock`. Wall-clock time appears only where other machines must
agree on it (DHT expiry) and in what people read.
"""

import asyncio
import math
import time
from typing import Protocol

JUMP_SECONDS = 2.0
"""A wall clock that moves so much against the monotonic one has been set, or the machine slept."""
DOUBT_SECONDS = 30.0
"""For how long a clock that has been set is not believed: many are set back soon."""


class Clock(Protocol):
    """A source of time in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...

    def time(self) -> float:
        """Seconds since the epoch, as the machine believes."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`. Cancellation ends the wait at once."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SteadyTime:
    """Wall-clock time, as of the last look, that follows a jump of the machine's clock only after DOUBT_SECONDS."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen = self._offset = clock.time() - clock.monotonic()
        self._jumped_at = -math.inf

    def now(self) -> float:
        """Seconds since the epoch."""
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
        """Whether the clock, as of the last look, has been set within DOUBT_SECONDS: nothing has surely expired."""
        return self._clock.monotonic() - self._jumped_at < DOUBT_SECONDS


class ManualClock:
    """A clock that moves only when told to: for tests and for code that runs on virtual time."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.Event()
        sleeper = (self._now + seconds, woken)
        self._sleepers.append(sleeper)
        try:
            await woken.wait()
        finally:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    def advance(self, seconds: float) -> None:
        """Move time forward and wake every sleeper whose time has come."""
        assert seconds >= 0, "time does not go back"
        self._now += seconds
        for wake_at, woken in self._sleepers:
            if wake_at <= self._now:
                woken.set()
