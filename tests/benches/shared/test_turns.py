"""Processes that take turns: how long the bench waits for them, and that it notices their death."""

import sys
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared import common, turns
from scripts.benches.shared.turns import Worker
from swarm.errors import DeadlineExceeded, PeerUnavailable

PROGRAM = """
import sys, time
from pathlib import Path
from scripts.benches.shared.turns import take_turns
take_turns(Path(sys.argv[1]), lambda: {work})
"""


def _worker(work: str, folder: Path, children: Supervisor) -> Worker:
    """A process that does this in each of its turns; it waits for the first."""
    results = folder / "results"
    worker = Worker("worker", [sys.executable, "-c", PROGRAM.format(work=work), str(results)], results, children)
    worker.until_stopped()
    return worker


def test_a_turn_may_take_longer_than_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Supervisor(tmp_path) as children:
        worker = _worker("time.sleep(0.5)", tmp_path, children)
        # A start may take as long as wait_for_json waits by default.
        defaults = common.wait_for_json.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "timeout_seconds", 0.1)
        worker.begin()
        assert 0.5 <= worker.seconds() < 60
        # A stopped process would not end by SIGTERM.
        for child in children.running:
            children.kill9(child)


def test_a_turn_may_say_itself_what_counts(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as children:
        worker = _worker("1234.5", tmp_path, children)
        worker.begin()
        assert worker.seconds() == 1234.5
        for child in children.running:
            children.kill9(child)


def test_a_process_that_ends_in_its_turn_or_never_waits_for_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Supervisor(tmp_path) as children:
        worker = _worker("sys.exit('no luck')", tmp_path, children)
        worker.begin()
        with pytest.raises(PeerUnavailable, match="worker ended early: no luck"):
            worker.seconds()
        monkeypatch.setattr(turns, "START_SECONDS", 0.0)
        with pytest.raises(DeadlineExceeded, match="idle is not ready"):
            Worker("idle", ["sleep", "60"], tmp_path / "idle", children).until_stopped()
