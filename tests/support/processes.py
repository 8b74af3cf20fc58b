"""Whether a process is still there, by its id alone: for children of children, which nobody here can wait for."""

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not reaped yet does not count."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # The latter comes if it is reaped between opening and reading.
        return False


def wait_until_gone(*pids: int, seconds: float = 10.0) -> None:
    """Wait until these processes have ended, for so long at most."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)
