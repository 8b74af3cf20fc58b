"""Programs as processes that are forked from one that has imported their libraries, which takes three seconds of CPU.

A test of real processes starts many programs. So each process that runs tests has one process that has imported what
they need, and that has no thread and no connection. A program is forked from it, and is then like any other one: a
child of the process that runs the tests, with a process group, an environment and output of its own, and it runs its
entry point from the first line. A program whose imports could turn out otherwise is started in the usual way: one of
another release, for example.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from peers import commands
from peers.local.supervisor import Process, spawned
from peers.shared.process import die_with_parent, prepare_environment

PROGRAMS = ("doctor", "generate", "model", "peer", "status", "trainer")
"""Commands whose libraries are there already."""
_READ_LATE = re.compile(r"HF_\w+|PYTEST_CURRENT_TEST|PYTHONUNBUFFERED|SWARM_\w+|XDG_CACHE_HOME")
"""Variables that no library reads while it is imported, so that a program may have other ones."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 17
_POLL_SECONDS = 0.02


class Forked:
    """A child of this process, with what tests use of subprocess.Popen."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._command = command

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code as subprocess has it. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            found, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            else:
                time.sleep(_POLL_SECONDS)
        return self.returncode


def spawn(
    command: Sequence[Any], environment: Mapping[str, str], stdout: IO[Any], stderr: IO[Any] | None = None
) -> Process:
    """Start a program as `peers.local.supervisor.spawned` does, but fork it where that makes no difference."""
    words = [str(word) for word in command]
    namespace = None
    if words[:3] == ["ip", "netns", "exec"]:
        _, _, _, namespace, *words = words
    program = re.fullmatch(r"from peers\.commands import (\w+); \1\(\)", words[3]) if len(words) > 3 else None
    if program is None or words != commands.command_line(program[1], words[4:]) or program[1] not in PROGRAMS:
        return spawned(command, environment, stdout, stderr)
    # Other systems cannot adopt a process, and with more threads numpy begins them while it is imported.
    if sys.platform != "linux" or os.environ.get("OMP_NUM_THREADS") != "1":
        return spawned(command, environment, stdout, stderr)
    parent = _parent_of_programs()
    if not parent.suits(environment):
        return spawned(command, environment, stdout, stderr)
    request = {
        "program": program[1], "arguments": words[4:], "environment": dict(environment), "folder": os.getcwd(),
        "namespace": namespace,
    }  # fmt: skip
    return Forked(parent.fork(request, [stdout.fileno(), (stderr or stdout).fileno()]), words)


class _Parent:
    """The process that has imported everything, as the process that runs the tests sees it."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", __file__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], preexec_fn=die_with_parent(),
                start_new_session=True,
            )  # fmt: skip

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether libraries would have been imported just so in this environment."""
        both = self._environment.items() ^ environment.items()
        return all(_READ_LATE.fullmatch(name) for name, _ in both)

    def fork(self, request: Mapping[str, Any], output: Sequence[int]) -> int:
        """Fork a program, whose stdout and stderr are these files. Returns its process id."""
        with self._lock, _adopting():
            socket.send_fds(self._requests, [json.dumps(request).encode()], output)
            answer = self._requests.recv(_MOST_BYTES)
        assert answer, "the process with the libraries has ended"
        return int(answer)

    def close(self) -> None:
        self._requests.close()  # This ends the process.
        self._process.wait()


@functools.cache
def _parent_of_programs() -> _Parent:
    parent = _Parent()
    atexit.register(parent.close)
    return parent


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Within the block, a process whose parent ends becomes this process's child."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- in the other process ----------------------------------------------------------------------------------------------


def _import_all() -> None:
    prepare_environment()
    for program in PROGRAMS:
        commands.load(getattr(commands, program).args[1])
    from swarm.dht.launcher import Launcher
    from swarm.machine.clock import SystemClock

    # This imports hivemind's DHT in the way in which a program does it.
    Launcher(clock=SystemClock(), host="", port=0, announce=(), identity_path=None, client_mode=True)
    for drawing in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        commands.load(drawing)
    # A thread would not be there after a fork, and what it had locked would stay locked.
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread while it was imported"


def _serve(requests: socket.socket, runner: int) -> str:
    """Fork a program for each request. Return its name in the new process; ends the process once nobody asks."""
    while True:
        message, output, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
        if not message:
            sys.exit()
        pid = _fork_for(runner)
        if pid == 0:
            requests.close()
            return _begin(json.loads(message), output)
        for file in output:
            os.close(file)
        requests.send(str(pid).encode())


def _fork_for(runner: int) -> int:
    """Fork a process whose parent is the process that runs the tests. Returns its id here, and 0 there."""
    told_read, told_write = os.pipe()
    adopted_read, adopted_write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(told_write, str(pid).encode())
            os._exit(0)
        os.close(adopted_write)
        os.read(adopted_read, 1)  # It ends once the process between is gone, and the one above has seen that.
    else:
        os.waitpid(between, 0)
        pid = int(os.read(told_read, 32))
        os.close(adopted_write)
    for file in (told_read, told_write, adopted_read):
        os.close(file)
    if pid == 0:
        os.setsid()
        die_with_parent(runner)()
    return pid


def _begin(request: Mapping[str, Any], output: Sequence[int]) -> str:
    for number, file in enumerate(output, 1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request["namespace"] is not None:
        place = os.open(f"/run/netns/{request['namespace']}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(place, _CLONE_NEWNET) == 0
        os.close(place)
    sys.argv = ["-c", *request["arguments"]]
    return str(request["program"])


if __name__ == "__main__":
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        _import_all()
        chosen = _serve(asked, int(sys.argv[2]))
    getattr(commands, chosen)()
