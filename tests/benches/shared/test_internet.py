"""Namespaces do not stay behind, however the process ends that made them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benches.shared.internet import Internet, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there")

BENCH = """
import sys, time
from dataclasses import dataclass
from types import ModuleType

from peers.shared import stopping
from scripts.benches.menu import run_named
from scripts.benches.shared.common import OutputOptions
from scripts.benches.shared.internet import Internet


def run(options):
    with Internet() as internet:
        internet.public_host()
        print("laid", flush=True)
        time.sleep(60)


bench = ModuleType("bench")
bench.Options, bench.run = OutputOptions, run
sys.argv = ["bench", "waits"]
sys.exit(stopping.run_program("bench", lambda: run_named("bench", "benches", {"waits": ""}, lambda name: bench)))
"""


def _made_by(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"swarm{pid}-")]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_namespaces_are_removed_at_the_end_or_at_the_next_start(number: signal.Signals) -> None:
    command, root = [sys.executable, "-c", BENCH], Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root) as bench:
        try:
            assert bench.stdout is not None
            assert bench.stdout.readline() == b"laid\n"
            assert len(_made_by(bench.pid)) == 2
            bench.send_signal(number)
            bench.communicate(timeout=30.0)
        finally:
            bench.kill()
    if number is signal.SIGKILL:
        assert len(_made_by(bench.pid)) == 2
        with Internet():
            assert not _made_by(bench.pid)
    else:
        assert bench.returncode == 128 + number
        assert not _made_by(bench.pid)
