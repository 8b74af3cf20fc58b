"""Measures how late the event loop is. While a task holds the loop, a peer answers nothing and looks dead.

peers/stage_peer runs it beside everything else, and reports its figure to others.
"""

from swarm.machine.clock import Clock

KEPT_SECONDS = 60.0
"""A lag is remembered for at least this long, and at most twice as long."""
_GAP_SECONDS = 0.02
"""Time between two measurements. A lag may be longer than its measurement by up to this time."""


class LoopLag:
    """Measures the event loop on which it runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._largest = self._largest_before = 0.0
        """The largest lag of the present period, and of the one before it."""

    @property
    def seconds(self) -> float:
        """The longest lag within the last KEPT_SECONDS, or up to twice that."""
        return max(self._largest, self._largest_before)

    async def run(self) -> None:
        """Measure until cancelled."""
        began_at = self._clock.monotonic()
        while True:
            due_at = self._clock.monotonic() + _GAP_SECONDS
            await self._clock.sleep(_GAP_SECONDS)
            now = self._clock.monotonic()
            if now >= began_at + KEPT_SECONDS:
                began_at, self._largest_before, self._largest = now, self._largest, 0.0
            self._largest = max(self._largest, now - due_at)
