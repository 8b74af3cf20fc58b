"""The bench `exactly-once` finds what it plants."""

import random
from pathlib import Path

import pytest

from scripts.benches.exactly_once import FaultySwarm, _plant
from tests.audit.honest import HonestRun


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_span", [False, True])
def test_a_planted_duplicate_and_a_planted_loss_are_found(tmp_path: Path, seed: int, has_span: bool) -> None:
    run = HonestRun(tmp_path / "logs", has_span=has_span)
    run.accumulate("peer-1b", 4)
    run.roll_back("peer-1b", 4)
    for number in range(2):
        run.round(number)
    assert _plant(run.files, tmp_path / "planted", random.Random(seed)) == {"duplicate": 1, "loss": 1}


def _told(faulty: FaultySwarm) -> list[str]:
    return sorted(str(peer.told) for peer in faulty.swarm.peers)
