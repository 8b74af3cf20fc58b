"""Runs processes one after another, so that each has the machine to itself while it is measured.

`take_turns` runs in the process, which stops itself (SIGSTOP) whenever it has nothing to do, so that it takes no time
from the others. `Worker` runs in the bench, and continues the process. The seconds of a turn are written to a file.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared.common import POLL_SECONDS, START_SECONDS, fail_on_exit, wait_for_json, write_json
from swarm.errors import DeadlineExceeded

TURN_SECONDS = 24 * 3600.0
"""Longest turn. It is long because a user may ask for any amount of work. If the process dies, this is noticed at
once."""


def take_turns(results: Path, work: Callable[[], float | None]) -> None:
    """Do `work` each time this process is continued, until it is killed. The seconds of turn N are written to
    `results`/N.json.

    Args:
        work: does a turn's work. It may return the seconds that count for it; if it returns None, those that it took
            count.
    """
    for turn in itertools.count():
        signal.raise_signal(signal.SIGSTOP)
        start = time.perf_counter()
        seconds = work()
        if seconds is None:
            seconds = time.perf_counter() - start
        write_json(results / f"{turn}.json", {"seconds": seconds})


class Worker:
    """A process that takes turns, and is stopped between them."""

    def __init__(self, name: str, command: Sequence[str], results: Path, children: Supervisor) -> None:
        """Start the process, which must call `take_turns` with the folder `results`."""
        self._children = children
        self._results = results
        self._results.mkdir(parents=True)
        self._turn = 0
        self._child: Child = children.start(name, command)

    def until_stopped(self) -> None:
        """Wait until the process has stopped: after its start, or when its turn is over.

        Raises:
            PeerUnavailable: some child ended meanwhile.
            DeadlineExceeded: this took longer than START_SECONDS.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            # If the process has ended, it can no longer stop, and waitid raises an error.
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WNOHANG) is not None:
                    return
            fail_on_exit(self._children)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self._child.name} is not ready after {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def begin(self) -> None:
        """Let the process begin its turn."""
        os.kill(self._child.pid, signal.SIGCONT)

    def seconds(self) -> float:
        """Wait for the end of the turn, for TURN_SECONDS at most, and return its seconds. Raises what `until_stopped`
        raises."""
        result = wait_for_json(self._results / f"{self._turn}.json", self._children, timeout_seconds=TURN_SECONDS)
        self._turn += 1
        self.until_stopped()
        return float(result["seconds"])
