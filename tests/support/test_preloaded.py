"""A forked program does what one does that was started."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from peers.commands import command_line
from peers.local.supervisor import Spawn, Supervisor, spawned
from tests.support.preloaded import Forked, spawn
from tests.support.swarm import wait_until

pytestmark = pytest.mark.e2e


def test_it_says_the_same_and_ends_with_the_same_code(tmp_path: Path) -> None:
    def told_by(starts: Spawn) -> tuple[int, str]:
        with (tmp_path / "log").open("w+b") as log:
            code = starts(command_line("peer", ["--stage", "x"]), os.environ, log).wait(60.0)
        return code, (tmp_path / "log").read_text()

    code, text = told_by(spawn)
    assert (code, text) == told_by(spawned)
    assert "swarm-peer" in text


def test_the_supervisor_sees_its_end_and_what_ended_it(tmp_path: Path) -> None:
    with Supervisor(tmp_path, spawn=spawn) as children:
        # Nobody is there, so it waits.
        child = children.start(
            "waits", command_line("trainer", ["--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/Qm{'1' * 44}"])
        )
        assert isinstance(child.process, Forked)
        with pytest.raises(subprocess.TimeoutExpired):
            child.process.wait(0.05)
        assert os.getpgid(child.pid) == child.pid
        child.process.send_signal(signal.SIGKILL)
        [ended] = wait_until(children.exits, 10.0, "the end")
    assert (ended.returncode, ended.reason) == (-signal.SIGKILL, "ended by SIGKILL")


@pytest.mark.parametrize(("name", "is_forked"), [("XDG_CACHE_HOME", True), ("PYTHONPATH", False)])
def test_it_is_started_where_libraries_could_differ(tmp_path: Path, name: str, is_forked: bool) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = spawn(command_line("status", ["--help"]), {**os.environ, name: str(tmp_path)}, log)
        assert isinstance(process, Forked) == is_forked
        process.wait(60.0)
