"""Clocks that move only when they are told to."""

import asyncio


class ManualClock:
    """A clock whose time a test moves forward, and whose sleepers wake as their time comes."""

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


class SetClock(ManualClock):
    """A clock that shows a time of day which is ahead of its monotonic time by a number of seconds."""

    ahead = 0.0

    def time(self) -> float:
        return self.monotonic() + self.ahead
