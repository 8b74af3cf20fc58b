"""Tries a call again for a while. It is for programs that join others, which may be starting at the same moment.

Used where the DHT is entered (dht/kademlia), and where a run and its peers are looked for (peers/shared). A line in the
log soon says what is waited for.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.machine.waits import Waits
from swarm.machine.words import counted

JOIN_SECONDS = 25.0
"""A call that fails is tried again for this long."""
RETRY_SECONDS = 0.5
"""Time between two attempts."""
FIRST_SECONDS = 2.0
"""After this time a line in the log names what is waited for, and the longest wait."""

logger = logging.getLogger(__name__)

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

    waits = Waits(first_seconds=FIRST_SECONDS, level=logging.WARNING)
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
                    if is_news and seconds > FIRST_SECONDS:
                        logger.warning("waiting for %s, %.0f s so far", what(seconds), seconds)
                await clock.sleep(RETRY_SECONDS)
    finally:
        telling.cancel()
