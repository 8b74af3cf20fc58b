"""One of the project's programs, with a wall clock that can be set from outside.

    python -m scripts.benches.chaos.program NAME CLOCK_FILE ARGUMENTS...

Started by chaos for every peer and trainer. The file holds, as a double, by how many seconds the process's clock is
ahead; monotonic time stays right, as on a machine whose clock is set.
"""

import mmap
import struct
import sys
import time
from pathlib import Path

_FORMAT = "d"


def set_clock(path: Path, seconds: float) -> None:
    """Have the clock of the processes that were started with this file be so far ahead."""
    if not path.exists():
        path.write_bytes(struct.pack(_FORMAT, 0.0))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        struct.pack_into(_FORMAT, memory, 0, seconds)


def read_clock(path: Path) -> float:
    """By how many seconds these clocks are ahead."""
    (seconds,) = struct.unpack(_FORMAT, path.read_bytes())
    return float(seconds)


def _wind(path: Path) -> None:
    """Have this process's `time.time` obey the file; before anything is imported that keeps the function."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    right = time.time
    time.time = lambda: right() + struct.unpack_from(_FORMAT, memory)[0]


if __name__ == "__main__":
    _wind(Path(sys.argv[2]))
    program = sys.argv[1]
    sys.argv = [f"swarm-{program}", *sys.argv[3:]]
    from peers import commands

    getattr(commands, program)()
