"""The parts of the bench `exactly-once` that judge: what it plants, and whom it may kill."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peers.local.supervisor import Child, Supervisor
from scripts.benches import exactly_once
from scripts.benches.exactly_once import FAULTS, FaultySwarm, Options, _config, _held, _plant
from scripts.benches.shared.swarm import SwarmProcesses
from swarm.errors import DeadlineExceeded, PeerUnavailable
from tests.audit.honest import HonestRun


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_duplicate_and_a_planted_loss_are_found(tmp_path: Path, seed: int) -> None:
    run = HonestRun(tmp_path / "logs")
    run.accumulate("peer-1b", 4)
    run.roll_back("peer-1b", 4)
    for number in range(2):
        run.round(number)
    assert _plant(run.files, tmp_path / "planted", random.Random(seed)) == {"duplicate": 1, "loss": 1}


def test_only_what_counts_is_stolen(tmp_path: Path) -> None:
    run = HonestRun(tmp_path)
    run.accumulate("peer-0a", 1)
    run.roll_back("peer-0a", 1)
    run.round(0)
    run.train("peer-0a", 8)
    assert len(_held(tmp_path / "peer-0a.jsonl")) == 4
    assert _held(tmp_path / "trainer.jsonl") == []


def test_nobody_is_killed_whom_nobody_can_replace(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as children:
        faulty = FaultySwarm(SwarmProcesses(_config(Options()), children, tmp_path), random.Random(0))
        assert not FAULTS["kills"](faulty)
        assert not FAULTS["pairs"](faulty)
        assert not faulty.faults


class _OneStep(SwarmProcesses):
    """A swarm without peers, whose trainer takes its only step at once and ends after 0.5 s."""

    def launch_trainer(self, *arguments: Any, **options: Any) -> Child:
        return self.children.start("trainer", ["sleep", "0.5"])

    def steps(self, name: str) -> list[dict[str, Any]]:
        return [{}]


@pytest.mark.parametrize(
    ("joiner", "error", "line"),
    [
        ("sleep 1; echo no luck; exit 1", PeerUnavailable, "joiner ended early: no luck"),
        ("sleep 60", DeadlineExceeded, "joiner does not serve 2 s after the last step"),
    ],
)
def test_a_joiner_that_fails_after_the_last_step_fails_the_bench(
    joiner: str, error: type[Exception], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(faulty: FaultySwarm) -> bool:
        faulty.joining.append((faulty.swarm.children.start("joiner", ["sh", "-c", joiner]), 0))
        return True

    monkeypatch.setattr(exactly_once, "START_SECONDS", 2.0)
    with Supervisor(tmp_path) as children:
        faulty = FaultySwarm(_OneStep(_config(Options()), children, tmp_path), random.Random(0))
        with pytest.raises(error, match=line):
            faulty.train(2, join)
        assert faulty.owed == 0


def test_a_swarm_in_which_nothing_fails_or_too_little_has_not_been_put_to_test(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as children:
        swarm = SwarmProcesses(_config(Options()), children, tmp_path)
        assert not FaultySwarm(swarm, random.Random(0)).was_put_to_test
        assert not FaultySwarm(swarm, random.Random(0), Counter(kill=3), owed=1).was_put_to_test
        assert FaultySwarm(swarm, random.Random(0), Counter(kill=3)).was_put_to_test
