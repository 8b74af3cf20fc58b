"""Tasks that outlive the call that asks for them, and waits that end in time. Used by pipeline, stage and averaging."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from swarm.errors import NotReady

Result = TypeVar("Result")


def spawn(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task of the group. This fails for a call that is still ending when the group has ended.

    Raises:
        NotReady: the group has ended, and `work` will never run.
    """
    try:
        return tasks.create_task(work)
    except RuntimeError:
        # Closed, because the garbage collector would later report a coroutine that was never awaited.
        work.close()
        raise NotReady("this peer is stopping") from None


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
