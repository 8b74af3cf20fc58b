"""How late the event loop comes to what is due: what holds it makes the peer answer nobody, and look dead for as long.

Run by peers/stage_peer beside everything else; its figure is what others are told. Never does anything about it.
"""

from swarm.machine.clock import Clock

KEPT_SECONDS = 60.0
"""For how long, at least, a lag is remembered; it is forgotten after twice as long."""
_GAP_SECONDS = 0.02
"""Between two looks; of what holds the loop for some time, as much may go unnoticed."""


class LoopLag:
    """Measures the event loop on which it runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._largest = self._largest_before = 0.0
        """In the present period, and in the one before it."""

    @property
    def seconds(self) -> float:
        """The longest time by which something was late of late."""
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
