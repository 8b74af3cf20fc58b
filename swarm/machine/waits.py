"""Collects the waits of a process, for its log and for status requests; tries a call again for a while.

Code that waits registers its wait here. A wait of more than a few seconds is logged, with its length and progress so
far, and then again at growing intervals. `patiently` is for programs that join others, which may be starting at the
same moment.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Never, TypeVar

from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.machine.words import counted

logger = logging.getLogger(__name__)

FIRST_SECONDS = 4.0
"""How long a wait lasts before it is logged, unless another time is given."""
LONGEST_GAP_SECONDS = 60.0
"""The longest time between two lines about one wait. The time grows with the wait up to this."""
LOOK_SECONDS = 0.5

What = Callable[[float], str]
"""Called with the seconds that the wait has lasted. Returns words that can follow "waiting for"; an empty text means
that nothing is waited for now."""
JOIN_SECONDS = 25.0
"""A call that fails is tried again for this long."""
RETRY_SECONDS = 0.5
"""Time between two attempts."""
SAY_SECONDS = 2.0
"""After this time a line in the log names what is waited for, and the longest wait."""


@dataclass(eq=False)
class _Wait:
    what: What
    since: float | None = None
    due_at: float = 0.0


@dataclass(eq=False)
class Waits:
    first_seconds: float = FIRST_SECONDS
    """How long a wait lasts before it is logged."""
    level: int = logging.INFO
    """The level at which waits are logged."""
    _waits: list[_Wait] = field(default_factory=list, init=False)
    """The newest wait comes last. If a wait is inside another one, the inner wait is more informative."""
    _present: list[str] = field(default_factory=list, init=False)

    @contextmanager
    def on(self, what: str | What) -> Iterator[None]:
        """Count the block as a wait for `what`. If `what` is a function, it is called at each look."""
        wait = _Wait((lambda _: what) if isinstance(what, str) else what)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    @property
    def present(self) -> str:
        """The newest wait of a second or more at the last look, and how long it has lasted; empty if there is none."""
        return self._present[-1] if self._present else ""

    def look(self, now: float) -> None:
        """Note how long each wait has lasted, and log the waits that are due."""
        self._present = []
        for wait in list(self._waits):
            since = now if wait.since is None else wait.since
            if not (text := wait.what(now - since)):
                wait.since = None
                continue
            if wait.since is None:
                wait.since, wait.due_at = now, now + self.first_seconds
            seconds = now - wait.since
            if seconds >= 1.0:
                self._present.append(f"{text} ({seconds:.0f} s)")
            if now >= wait.due_at:
                wait.due_at = now + min(LONGEST_GAP_SECONDS, 2.0 * seconds)
                logger.log(self.level, "waiting for %s, %.0f s so far", text, seconds)

    async def run(self, clock: Clock) -> Never:
        while True:
            self.look(clock.monotonic())
            await clock.sleep(LOOK_SECONDS)


Result = TypeVar("Result")


async def patiently(
    call: Callable[[], Awaitable[Result]], clock: Clock, wanted: str, *,
    final: type[PeerUnavailable] | tuple[()] = (),
) -> Result:  # fmt: skip
    """Make a call again and again until it does not raise PeerUnavailable, and return its result.

    Args:
        wanted: names what is waited for, in words for people.
        final: kinds of PeerUnavailable after which no attempt can succeed.

    Raises:
        PeerUnavailable: the last attempt's error, after JOIN_SECONDS, or a final one.
        Exception: whatever else the call raises.
    """
    began_at = clock.monotonic()
    faults: list[PeerUnavailable] = []

    def what(_: float) -> str:
        why = f", the last time because {faults[-1]}" if faults else ""
        return f"{wanted} ({JOIN_SECONDS:.0f} s at most; tried {counted(len(faults) + 1, 'time')}{why})"

    waits = Waits(first_seconds=SAY_SECONDS, level=logging.WARNING)
    telling = asyncio.create_task(waits.run(clock))
    try:
        with waits.on(what):
            while True:
                try:
                    return await call()
                except PeerUnavailable as fault:
                    is_news = not faults or str(fault) != str(faults[-1])
                    faults.append(fault)
                    seconds = clock.monotonic() - began_at
                    if isinstance(fault, final) or seconds > JOIN_SECONDS:
                        raise
                    # After the first line, a new reason is logged at once, and does not wait for the next line.
                    if is_news and seconds > SAY_SECONDS:
                        logger.warning("waiting for %s, %.0f s so far", what(seconds), seconds)
                await clock.sleep(RETRY_SECONDS)
    finally:
        telling.cancel()
