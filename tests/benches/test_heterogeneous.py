"""The figures of the bench `heterogeneous`, and the rules that it compares with."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from scripts.benches.heterogeneous import Work, share_of_capacity, work_over_capacity
from scripts.benches.routing_program import COSTS, replace_choice
from swarm.clock import ManualClock
from swarm.routing.peer_queue import PeerQueue
from swarm.routing.router import Router
from swarm.types import PeerId, PeerRecord, PeerState


def _work(stage: int, capacity: float, rate: float) -> Work:
    return Work(stage=stage, capacity=capacity, rate=rate)


def test_capacity_is_that_of_the_poorest_stage_at_each_time() -> None:
    rich_first = [_work(0, 2.0, 1.0), _work(0, 2.0, 1.0), _work(1, 2.0, 1.9)]
    poor_first = [_work(0, 1.0, 0.9), _work(1, 2.0, 0.9)]
    assert share_of_capacity([rich_first, poor_first]) == pytest.approx(2.8 / 3.0)


def test_who_does_more_than_his_share_stands_out() -> None:
    """A slow one that gets as much as a fast one; the other stage does not matter."""
    assert work_over_capacity([_work(0, 3.0, 1.0), _work(0, 1.0, 1.0), _work(1, 5.0, 5.0)]) == pytest.approx(
        [0.5 / 0.75, 0.5 / 0.25, 1.0]
    )


@pytest.fixture
def router(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Router:
    """Three peers, of which one claims to be much faster, and another rule than the queue's."""
    for name in ("_charge", "_enter", "_idle_member"):
        monkeypatch.setattr(PeerQueue, name, getattr(PeerQueue, name))  # Put back at the end.
    cost = COSTS[request.param]
    assert cost is not None
    replace_choice(cost)
    router = Router(ManualClock(), random.Random(0))
    router.update(
        0,
        [
            PeerRecord(
                peer_id=f"{number:040x}", announced_at=0.0, stage=0, endpoint="host:1", state=PeerState.SERVING,
                samples_per_second=100.0 if number == 0 else 1.0,
            )
            for number in range(3)
        ],
    )  # fmt: skip
    return router


def _choose(router: Router, times: int) -> list[int]:
    """Each of them answers at once, and has nothing more to do."""
    chosen = []
    for _ in range(times):
        record = router.choose(0, 8)
        assert record is not None
        chosen.append(int(record.peer_id, 16))
        router.succeeded(PeerId(record.peer_id), num_samples=8, busy_seconds=1.0, link_seconds=None, queue_length=0)
    return chosen


@pytest.mark.parametrize("router", ["round_robin"], indirect=True)
def test_round_robin_takes_everybody_in_turn(router: Router) -> None:
    chosen = _choose(router, 30)
    assert Counter(chosen) == {0: 10, 1: 10, 2: 10}
    assert chosen[:3] * 10 == chosen


@pytest.mark.parametrize("router", ["random"], indirect=True)
def test_random_takes_anybody_whoever_came_before(router: Router) -> None:
    chosen = _choose(router, 9000)
    assert all(abs(count - 3000) < 200 for count in Counter(chosen).values())
    assert all(abs(count - 1000) < 150 for count in Counter(pairwise(chosen)).values())
