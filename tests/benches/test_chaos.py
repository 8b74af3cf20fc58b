"""What chaos computes from event logs, and that its faults end."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peers.local.supervisor import Supervisor
from peers.shared.stage_choice import StageChoice
from scripts.benches.chaos import figures
from scripts.benches.chaos.cast import Cast
from scripts.benches.chaos.faults import KINDS
from scripts.benches.shared.throttle import Throttle


def _begin(number: int, lineage: str, attempt: int = 1) -> dict[str, Any]:
    return {"event": "begin", "round": number, "lineage": lineage, "attempt": attempt, "leader": "a"}


def _commit(number: int, parent: str, lineage: str, at: float, *members: str) -> dict[str, Any]:
    return {
        "event": "commit", "round": number, "parent": parent, "lineage": lineage, "monotonic": at, "samples": 8,
        "members": members or ("a", "b"),
    }  # fmt: skip


def test_the_rounds_of_abandoned_branches_are_left_out_and_those_before_a_checkpoint_count() -> None:
    one = [_begin(0, "0"), _commit(0, "0", "1", 10.0), _commit(1, "1", "2", 20.0), _commit(2, "2", "3", 30.0)]
    other = [_begin(0, "0", 2), _commit(0, "0", "1", 10.5), _commit(1, "1", "lost", 19.0, "b")]
    chain = figures.chain([one, other])
    assert [(c.lineage, c.at, c.attempts) for c in chain] == [("1", 10.0, 2), ("2", 20.0, 0), ("3", 30.0, 0)]
    gone_back = figures.chain([[_commit(0, "0", "1", 10.0), _commit(3, "again at 3", "4", 40.0)]])
    assert [committed.round for committed in gone_back] == [0, 3]


def test_a_swarm_that_has_stopped_for_good_does_not_pass() -> None:
    honest = figures.chain([[_commit(number, str(number), str(number + 1), 10.0 * number) for number in range(20)]])
    stopped, last = honest[:11], (140.0, 180.0)
    assert figures.goes_on({0: honest, 1: honest}, last)
    assert not figures.goes_on({0: honest, 1: stopped}, last)
    storm, calm = (60.0, 120.0), [(0.0, 40.0), last]
    rates = [figures.throughput(stopped, storm)], [figures.throughput(stopped, window) for window in calm]
    assert figures.share_of_possible(*rates, [1.0]) > 1.0, "what it is held against has fallen as well"
    passes = {**figures.GOALS, "duplicates": 0, "violations": [], "trainer_exits": 0, "missing": 0, "goes_on": True}
    assert figures.passed(passes)
    assert not figures.passed({**passes, "goes_on": False})


@pytest.fixture
def cast(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cast]:
    """Two stages of two peers each, or other peers, none of them started."""
    (tmp_path / "disk").mkdir()
    with Throttle() as throttle:
        cast = Cast(
            folder=tmp_path, config=tmp_path / "run.toml", children=Supervisor(tmp_path / "logs"), throttle=throttle,
            checkpoint_every=1, disk=tmp_path / "disk",
        )  # fmt: skip
        cast.add(2, getattr(request, "param", [0, 1, 0, 1]), trainers=1)
        yield cast


@pytest.mark.parametrize("cast", [[0, 1, 0, 1], [StageChoice(), 0, 1, 1]], indirect=True)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.hits == "network"])
def test_a_fault_of_the_network_ends_and_leaves_no_obstacle(cast: Cast, name: str) -> None:
    for seed in range(20):
        with ExitStack() as undo:
            assert KINDS[name].begin(cast, random.Random(seed), undo)
            assert cast.throttle.num_obstacles > 0
        assert cast.throttle.num_obstacles == 0
