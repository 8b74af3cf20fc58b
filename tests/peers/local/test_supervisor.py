"""Real children that sleep, fork, and refuse to go."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peers.local.supervisor import Exit, Supervisor
from tests.support.processes import is_running, wait_until_gone

FORKS = "sleep 61 & echo $!; wait"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"


def _first_line(log: Path) -> str:
    deadline = time.monotonic() + 10
    while "\n" not in log.read_text():
        assert time.monotonic() < deadline, f"nothing in {log}"
        time.sleep(0.02)
    return log.read_text().splitlines()[0]


def _next_exits(supervisor: Supervisor) -> list[Exit]:
    deadline = time.monotonic() + 10
    while not (exits := supervisor.exits()):
        assert time.monotonic() < deadline, "nothing ended"
        time.sleep(0.02)
    return exits


def test_leaving_ends_children_and_grandchildren(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start("forks", ["sh", "-c", FORKS])
        grandchild = int(_first_line(child.log))
        assert is_running(child.pid)
        assert is_running(grandchild)
    wait_until_gone(child.pid, grandchild)
    assert supervisor.running == []


def test_leaving_by_an_error_ends_them_too(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    child = supervisor.start("sleeps", ["sleep", "61"])
    with pytest.raises(KeyError), supervisor:
        raise KeyError
    wait_until_gone(child.pid)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor(tmp_path)
    child = supervisor.start("stubborn", ["sh", "-c", STUBBORN])
    _first_line(child.log)
    supervisor.terminate_all(grace_seconds=0.2)
    assert child.process.returncode == -signal.SIGKILL
    assert caplog.messages == ["killed, since they did not end by themselves: stubborn"]


def test_an_unexpected_exit_is_told_once_with_its_reason(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(
            "fails", ["sh", "-c", "sleep 61 & echo $!; echo 'swarm-x: error: port in use' >&2; exit 1"]
        )
        grandchild = int(_first_line(child.log))
        exits = _next_exits(supervisor)
        assert [(end.name, end.returncode, end.reason) for end in exits] == [
            ("fails", 1, "swarm-x: error: port in use")
        ]
        assert supervisor.exits() == []
        wait_until_gone(grandchild)


def test_logs_are_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with Supervisor(tmp_path / "logs") as supervisor:
            child = supervisor.start("first", ["echo", "ADDRESS#TOKEN"])
            _first_line(child.log)
    finally:
        os.umask(before)
    assert stat.S_IMODE(child.log.stat().st_mode) == 0o600


def test_children_die_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from peers.local.supervisor import Supervisor\n"
        "supervisor = Supervisor(Path(sys.argv[1]))\n"
        "print(supervisor.start('a', ['sleep', '61']).pid, supervisor.start('b', ['sleep', '61']).pid, flush=True)\n"
        "time.sleep(61)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    launcher.kill()
    launcher.communicate()
    assert len(pids) == 2
    wait_until_gone(*pids)
