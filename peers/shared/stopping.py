"""How a program is told to stop: by SIGINT (Ctrl-C) or SIGTERM.

Programs with an event loop wait for `stop_event`; the others do their work in `interruptible`.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from peers.shared.process import EXIT_INTERRUPTED

Result = TypeVar("Result")


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM interrupt the block as Ctrl-C does. For long work in the main thread that has to clean up."""

    def interrupt(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stop(asyncio.Event):
    """An event that is set when the program is to end. The program's exit code, if it ends before its work is done,
    depends on the signal; without one it is that for Ctrl-C."""

    exit_code = EXIT_INTERRUPTED

    def by(self, number: int) -> None:
        self.exit_code = 128 + number
        self.set()


def stop_event() -> Stop:
    """An event for the running loop, which SIGINT and SIGTERM set. A second Ctrl-C ends the process at once."""
    stop = Stop()

    def on_signal(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        stop.by(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def before(stop: Coroutine[Any, Any, object], work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run both until one ends. Then cancel the other one, and wait for its end. Return the result of `work`, or None if
    `stop` ended first. Raises the error of the one that ended first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop)
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        stopping.result()
        return None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait([working, stopping])
