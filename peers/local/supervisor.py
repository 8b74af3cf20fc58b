"""Child processes that never outlive their launcher.

Each child leads a process group of its own, so that its own children (p2pd) are killed with it, and the kernel kills it
if the launcher dies.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, Self

from peers.shared.process import die_with_parent

logger = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""How long children may take to end."""

_POLL_SECONDS = 0.02
_LOG_TAIL_BYTES = 8192


class Process(Protocol):
    pid: int
    returncode: int | Any
    """None while the process has not been waited for."""

    def send_signal(self, number: int, /) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Spawn = Callable[[Sequence[str | Path], Mapping[str, str], IO[bytes]], Process]
"""Starts a child from its command, its whole environment, and the file for its output."""


def spawned(
    command: Sequence[str | Path], environment: Mapping[str, str], stdout: IO[Any], stderr: IO[Any] | None = None
) -> Process:
    """Start a child that leads a process group, and that the kernel ends with this process. Its stderr goes to
    `stdout` unless another file is given."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr or stdout, env=environment,
        start_new_session=True, preexec_fn=die_with_parent(),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Child:
    """A started process. Its stdout and stderr go to `log`."""

    name: str
    log: Path
    process: Process

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, kw_only=True)
class Exit:
    name: str
    returncode: int
    """The exit code as subprocess has it: minus the signal's number when a signal ended the child."""
    reason: str
    """The last line of the child's log, or the signal's name."""


class Supervisor:
    """Starts children and ends them all when its `with` block ends, whatever ends it.

    Use it from the main thread: a child is killed when the thread that started it ends.
    """

    def __init__(self, log_folder: Path, *, grace_seconds: float = GRACE_SECONDS, spawn: Spawn = spawned) -> None:
        """When the block ends, children get SIGKILL so many seconds after SIGTERM."""
        self._spawn = spawn
        self._log_folder = log_folder
        self._grace_seconds = grace_seconds
        self._running: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate_all(self._grace_seconds)

    @property
    def running(self) -> list[Child]:
        """The children that have not been killed here, and that `exits` has not reported."""
        return list(self._running)

    def start(self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> Child:
        """Start a child that appends to `log_folder/name.log`; `environment` is added to the launcher's own. Raises
        OSError if the program or the log cannot be opened."""
        self._log_folder.mkdir(parents=True, exist_ok=True)
        log = self._log_folder / f"{name}.log"
        # Only this user may read the log: the lines with which others join a locked run have the token in them.
        with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
            # Output is unbuffered, because a killed child's last lines would be lost in a buffer.
            process = self._spawn(command, {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}, output)
        child = Child(name=name, log=log, process=process)
        self._running.append(child)
        return child

    def kill9(self, child: Child) -> None:
        """Kill a child and all that it forked, as a power cut would, and wait until it is gone."""
        self._running.remove(child)
        _reap(child)

    def exits(self) -> list[Exit]:
        """The children that ended by themselves since the last call. The rest of their process groups is killed."""
        ended = [child for child in self._running if _has_ended(child)]
        self._running = [child for child in self._running if child not in ended]
        return [Exit(name=child.name, returncode=_reap(child), reason=_reason(child)) for child in ended]

    def terminate_all(self, grace_seconds: float) -> None:
        """Send SIGTERM to every child, and SIGKILL to those that are left after the grace; Ctrl-C shortens the grace.

        The log names those that had to be killed: they have not written what they write at their end.
        """
        children, self._running = self._running, []
        try:
            for child in children:
                # Only the leader of the process group gets SIGTERM: a peer still needs its child p2pd to withdraw its
                # records.
                os.kill(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while not all(map(_has_ended, children)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        finally:
            if late := [child.name for child in children if not _has_ended(child)]:
                logger.warning("killed, since they did not end by themselves: %s", ", ".join(late))
            for child in children:
                _reap(child)


def last_line(log: Path) -> str:
    """The last line of a log that has anything in it, or nothing."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _has_ended(child: Child) -> bool:
    # The child is not reaped yet, so that no other process can get its id before its group has been killed.
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(child: Child) -> int:
    os.killpg(child.pid, signal.SIGKILL)
    return child.process.wait()


def _reason(child: Child) -> str:
    returncode = child.process.returncode
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    return last_line(child.log) or f"exit code {returncode}"
