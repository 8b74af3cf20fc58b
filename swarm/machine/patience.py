"""Trying again for a while: what a program does that joins others which may start at the same moment.

Used where the DHT is entered (dht/kademlia), and where a run and its peers are looked for (peers/shared). It soon says
what it waits for, so that nobody waits in silence.
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
"""How long it is tried."""
RETRY_SECONDS = 0.5
"""Time between two attempts."""
FIRST_SECONDS = 2.0
"""After so long a line says what is waited for, and for how long at most."""

Result = TypeVar("Result")


async def patiently(
    call: Callable[[], Awaitable[Result]], clock: Clock, wanted: str, *,
    final: type[PeerUnavailable] | tuple[()] = (),
) -> Result:  # fmt: skip
    """What the call gives, which is made again and again until it gives something. Cancellation ends it.

    Args:
        wanted: what is waited for, for people.
        final: kinds of PeerUnavailable that no other attempt would change.

    Raises:
        PeerUnavailable: the last attempt did, after JOIN_SECONDS, or a final one.
        Exception: what else the call raises.
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
                    faults.append(fault)
                    if isinstance(fault, final) or clock.monotonic() > began_at + JOIN_SECONDS:
                        raise
                await clock.sleep(RETRY_SECONDS)
    finally:
        telling.cancel()
