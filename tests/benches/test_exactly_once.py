"""The parts of the bench `exactly-once` that judge: what it plants, and whom it may kill."""

import random
from pathlib import Path

import pytest

from peers.supervisor import Supervisor
from scripts.benches.common import SwarmProcesses
from scripts.benches.exactly_once import FAULTS, Options, _config, _held, _plant
from scripts.benches.faults import FaultySwarm
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


def test_rounds_are_of_so_many_microbatches() -> None:
    assert _config(Options(round_microbatches=6)).microbatches_per_round == 6
    with pytest.raises(ValueError, match="--steps must be at least 4"):
        Options(steps=3)
