"""Signals between the parts of one peer's averaging: something has changed, or a report is due.

Others wait for a change of the round; the reporter (members/reporter) waits for something to tell.
"""

import asyncio

from swarm.machine.clock import Clock


class Changes:
    """What has changed at one peer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._progressed_at = clock.monotonic()
        self._report_due = asyncio.Event()
        self.next = asyncio.Event()
        """Set at the next change; then there is another one."""
        self.version = 0
        """Of what this peer has to report."""

    @property
    def quiet_seconds(self) -> float:
        """Since anybody's progress last changed."""
        return self._clock.monotonic() - self._progressed_at

    def signal(self) -> None:
        """The state of a round may have changed."""
        self.next.set()
        self.next = asyncio.Event()

    def progressed(self) -> None:
        """A member has more of the round, or less."""
        self._progressed_at = self._clock.monotonic()
        self.signal()

    def notify(self) -> None:
        """This peer has something new to report."""
        self.version += 1
        self._report_due.set()

    def report_again(self) -> None:
        """A report is due, though what it tells may be what was told already."""
        self._report_due.set()

    async def until_report_due(self, seconds: float) -> None:
        """Wait until there is something to report, but no longer than that."""
        await wait(self._report_due, seconds)
        self._report_due.clear()


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than that."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
