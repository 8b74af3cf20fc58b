"""What a process waits for, kept in one place for its log and for those who ask what it does.

Parts that wait say so for as long as they do. What lasts longer than a few seconds becomes a line, with how long it has
lasted and how far it is, and then lines at growing intervals. Knows nothing of what is waited for.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Never

from swarm.machine.clock import Clock

logger = logging.getLogger(__name__)

FIRST_SECONDS = 4.0
"""After so long a wait is a line of the log, unless something else is asked for."""
LONGEST_GAP_SECONDS = 60.0
"""The longest time between two lines of one wait: the time grows with the wait."""
LOOK_SECONDS = 0.5

What = Callable[[float], str]
"""What is waited for, in words that follow on "waiting for". It is given the seconds so far; an empty text says that
nothing is waited for now."""


@dataclass(eq=False)
class _Wait:
    what: What
    since: float | None = None
    due_at: float = 0.0


class Waits:
    """The waits of one process."""

    def __init__(self, *, first_seconds: float = FIRST_SECONDS, level: int = logging.INFO) -> None:
        """
        Args:
            first_seconds: how long a wait lasts before it is a line of the log.
            level: of these lines.
        """
        self._first_seconds = first_seconds
        self._level = level
        self._waits: list[_Wait] = []
        """The newest last: a wait within another is what that one comes down to."""
        self._present: list[str] = []

    @contextmanager
    def on(self, what: str | What) -> Iterator[None]:
        """The process waits for this inside the block, or may do so now and then where `what` is asked each time."""
        wait = _Wait((lambda _: what) if isinstance(what, str) else what)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    @property
    def present(self) -> str:
        """What was waited for at the last look, for a second at least, and for how long; empty for nothing."""
        return self._present[-1] if self._present else ""

    def look(self, now: float) -> None:
        """Note how long each wait has lasted, and log those that are due."""
        self._present = []
        for wait in list(self._waits):
            since = now if wait.since is None else wait.since
            if not (text := wait.what(now - since)):
                wait.since = None
                continue
            if wait.since is None:
                wait.since, wait.due_at = now, now + self._first_seconds
            seconds = now - wait.since
            if seconds >= 1.0:
                self._present.append(f"{text} ({seconds:.0f} s)")
            if now >= wait.due_at:
                wait.due_at = now + min(LONGEST_GAP_SECONDS, 2.0 * seconds)
                logger.log(self._level, "waiting for %s, %.0f s so far", text, seconds)

    async def run(self, clock: Clock) -> Never:
        """Look again and again, until cancelled."""
        while True:
            self.look(clock.monotonic())
            await clock.sleep(LOOK_SECONDS)
