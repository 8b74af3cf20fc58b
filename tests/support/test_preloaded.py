"""A forked program does what one does that was started."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from peers.commands import command_line
from peers.local.supervisor import Supervisor
from tests.support.preloaded import Forked, spawn
from tests.support.swarm import wait_until

pytestmark = pytest.mark.e2e


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
