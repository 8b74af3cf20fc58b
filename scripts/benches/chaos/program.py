"""Runs one of the project's programs with a wall clock that can be set from outside, and counts its tasks.

    python -m scripts.benches.chaos.program NAME CLOCK_FILE ARGUMENTS...

The file holds a double: the seconds by which the process's clock is ahead. Monotonic time stays right.
"""

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from grpc.aio import _utils

TASKS_FILE = "tasks"
TASKS_SECONDS = 5.0
_FORMAT = "d"


def set_clock(path: Path, seconds: float) -> None:
    """Put the clock of all processes that were started with this file this many seconds ahead."""
    if not path.exists():
        path.write_bytes(struct.pack(_FORMAT, 0.0))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        struct.pack_into(_FORMAT, memory, 0, seconds)


def wind(path: Path) -> None:
    """Make this process's `time.time` follow the file. Call this before importing any module that keeps a reference to
    the function."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    right = time.time
    time.time = lambda: right() + struct.unpack_from(_FORMAT, memory)[0]
    # gRPC computes deadlines with Python's clock and compares them with the clock of its C core. Only Python's clock is
    # changed here, so gRPC keeps the right one.
    _utils.time = SimpleNamespace(time=right)  # type: ignore[attr-defined, assignment]  # stands in for a module


def _count_tasks(path: Path) -> None:
    """Make every event loop of this process write its number of tasks to a file at intervals."""
    new_event_loop = asyncio.events.new_event_loop

    def counted() -> asyncio.AbstractEventLoop:
        loop = new_event_loop()

        def write() -> None:
            path.write_text(f"{len(asyncio.all_tasks(loop))}")
            loop.call_later(TASKS_SECONDS, write)

        loop.call_later(TASKS_SECONDS, write)
        return loop

    asyncio.events.new_event_loop = counted


if __name__ == "__main__":
    wind(Path(sys.argv[2]))
    _count_tasks(Path(sys.argv[2]).with_name(TASKS_FILE))
    program = sys.argv[1]
    sys.argv = [f"swarm-{program}", *sys.argv[3:]]
    from peers import commands

    getattr(commands, program)()
