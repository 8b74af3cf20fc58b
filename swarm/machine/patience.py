"""Trying again for a while: what a program does that joins others which may start at the same moment.

Used where the DHT is entered (dht/kademlia), and where a run and its peers are looked for (peers/shared). It soon says
what it is looking for, so that nobody waits in silence.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.machine.words import counted

logger = logging.getLogger(__name__)

JOIN_SECONDS = 25.0
"""How long it is tried."""
RETRY_SECONDS = 0.5
"""Time between two attempts."""
FIRST_SECONDS = 2.0
"""After so long a line says what is looked for, and for how long at most."""
SAY_SECONDS = 5.0
"""Time between two such lines."""

Result = TypeVar("Result")


async def patiently(
    call: Callable[[], Awaitable[Result]], clock: Clock, looking_for: str, *,
    final: type[PeerUnavailable] | tuple[()] = (),
) -> Result:  # fmt: skip
    """What the call gives, which is made again and again until it gives something. Cancellation ends it.

    Args:
        looking_for: for people.
        final: kinds of PeerUnavailable that no other attempt would change.

    Raises:
        PeerUnavailable: the last attempt did, after JOIN_SECONDS, or a final one.
        Exception: what else the call raises.
    """
    began_at = clock.monotonic()
    faults: list[PeerUnavailable] = []

    async def say() -> None:
        seconds = FIRST_SECONDS
        while True:
            await clock.sleep(seconds)
            seconds = SAY_SECONDS
            why = f", the last time because {faults[-1]}" if faults else ""
            logger.warning(
                "looking for %s: %.0f s so far, of %.0f; tried %s%s", looking_for, clock.monotonic() - began_at,
                JOIN_SECONDS, counted(len(faults) + 1, "time"), why,
            )  # fmt: skip

    saying = asyncio.create_task(say())
    try:
        while True:
            try:
                return await call()
            except PeerUnavailable as fault:
                faults.append(fault)
                if isinstance(fault, final) or clock.monotonic() > began_at + JOIN_SECONDS:
                    raise
            await clock.sleep(RETRY_SECONDS)
    finally:
        saying.cancel()
