"""swarm-local as a user starts it. It leaves no process behind."""

import json
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from tests.support.swarm import CONFIG, wait_until, whole_lines, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(450)]


def _start(children: Supervisor, folder: Path, *arguments: str) -> Child:
    config = folder / "run.toml"
    text = CONFIG.replace("num_stages = 2", "num_stages = 1")
    config.write_text(text.format(dataset=write_text(folder / "text.txt"), setting="diloco"), encoding="utf-8")
    command = command_line("local", ["--config", str(config), "--output", str(folder / "out"), *arguments])
    # Every process that it starts inherits this mark, so that its leftovers can be told from processes of other tests.
    return children.start("local", command, environment={"SWARM_TEST_MARK": str(folder)})


def _code(children: Supervisor, seconds: float) -> int:
    """The launcher's exit code, once it has ended."""
    [ended] = wait_until(children.exits, seconds, "the launcher to end")
    return int(ended.returncode)


def _marked(folder: Path) -> list[int]:
    """Processes, other than this one, that descend from the launcher."""
    mark = f"SWARM_TEST_MARK={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _assert_nothing_left(folder: Path, seconds: float) -> None:
    wait_until(lambda: not _marked(folder), seconds, "every process to end")


def _has_trained(folder: Path) -> bool:
    metrics = folder / "out" / "metrics.jsonl"
    return metrics.exists() and any("train/loss" in line for line in whole_lines(metrics))


def test_a_whole_run_with_a_kill_and_a_join(tmp_path: Path, children: Supervisor) -> None:
    texts = [word for name in ("one.txt", "other.txt") for word in ("--dataset", str(write_text(tmp_path / name)))]
    faults = ("--kill-at", "2", "--join-at", "3", "--peers-per-stage", "2", "--steps", "30", "--evaluate-every", "0")
    launcher = _start(children, tmp_path, *faults, "--sample-tokens", "20", *texts)
    code = _code(children, 400.0)
    output = launcher.log.read_text()
    assert code == 0, output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["peers_killed"] == 1
    assert summary["peers_joined"] == 1
    assert summary["steps"] == 30
    assert summary["validation_loss"] < summary["first_loss"] - 0.5
    # Both are the same text.
    assert summary["validation_losses"] == pytest.approx(
        dict.fromkeys(("one.txt", "other.txt"), summary["validation_loss"])
    )
    assert "the swarm goes on" in output
    assert (tmp_path / "out" / "loss.png").stat().st_size > 0
    _assert_nothing_left(tmp_path, 5.0)


# What is left of one that is killed: tests/peers/local/test_supervisor.py and, of a peer, tests/dht/test_node_p2pd.py.
def test_nothing_is_left_when_it_is_interrupted(tmp_path: Path, children: Supervisor) -> None:
    launcher = _start(children, tmp_path, "--peers-per-stage", "1", "--steps", "10000")
    wait_until(partial(_has_trained, tmp_path), 150.0, "the first step")
    assert len(_marked(tmp_path)) > 3
    started_at = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert _code(children, 30.0) == 130
    assert "Traceback" not in launcher.log.read_text()
    _assert_nothing_left(tmp_path, 25.0 - (time.monotonic() - started_at))
