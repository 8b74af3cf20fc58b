"""Input of a person, or a pipe, to a program that runs an event loop: lines of stdin, and Ctrl-C."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from peers.shared import stopping

Result = TypeVar("Result")

_READ_BYTES = 1 << 16


class Keyboard:
    """Lines and interrupts, for the running loop."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the program is to end because SIGTERM came."""
        self._interrupt = asyncio.Event()
        self._read_ahead = b""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt.set)
        loop.add_signal_handler(signal.SIGTERM, self._end)

    async def line(self) -> str | None:
        """The next line without its end; None if there are no more, or Ctrl-C came before it."""
        return await self.before_interrupt(self._next_line())

    async def before_interrupt(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Run `work` and return its result. If Ctrl-C or SIGTERM comes first, cancel `work`, wait for its end, and
        return None."""
        self._interrupt.clear()
        if self.is_over:
            self._interrupt.set()
        return await stopping.before(self._interrupt.wait(), work)

    def _end(self) -> None:
        self.is_over = True
        self._interrupt.set()

    async def _next_line(self) -> str | None:
        loop = asyncio.get_running_loop()
        read = loop.create_future()

        def tell(line: str | None) -> None:
            if not read.done():
                read.set_result(line)

        def wait_for_line() -> None:
            line = self._read_line()
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, line)

        # The thread may wait for ever. It is a daemon thread, because the threads of the loop's executor would keep the
        # process from ending.
        threading.Thread(target=wait_for_line, daemon=True).start()
        line: str | None = await read
        return line

    def _read_line(self) -> str | None:
        """Read the next line; blocks. This reads the descriptor, because a process cannot end while a thread holds the
        lock of Python's buffer."""
        while b"\n" not in self._read_ahead and (piece := os.read(sys.stdin.fileno(), _READ_BYTES)):
            self._read_ahead += piece
        line, mark, self._read_ahead = self._read_ahead.partition(b"\n")
        return line.decode(errors="replace") if line or mark else None
