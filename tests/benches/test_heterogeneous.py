"""The figures of the bench `heterogeneous`, and the rules that it compares with."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from scripts.benches.heterogeneous import (
    Options,
    Work,
    judge,
    paces,
    share_of_capacity,
    work_over_capacity,
)
from scripts.benches.sides.routing_program import COSTS, replace_choice
from swarm.errors import DeadlineExceeded
from swarm.routing.peer_queue import PeerQueue
from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.types import PeerId, PeerRecord, PeerState
from tests.support.manual_clock import ManualClock


def _work(peer: str, capacity: float, rate: float) -> Work:
    return Work(peer=peer, capacity=capacity, rate=rate)


def test_the_stage_that_changes_is_the_poorest_also_when_another_has_joined() -> None:
    options = Options()
    capacity = [sum(1 / seconds for stage, seconds in paces(options) if stage == number) for number in (0, 1)]
    assert capacity[1] > 1.3 * (capacity[0] + 1 / options.microbatch_seconds)


def test_capacity_grows_with_who_joins() -> None:
    all_ = [_work("a", 3.0, 2.9), _work("b", 1.0, 0.9)]
    joined = [_work("a", 3.0, 2.9), _work("b", 1.0, 0.9), _work("c", 3.0, 0.0)]
    assert share_of_capacity([all_]) == pytest.approx(3.8 / 4.0)
    assert share_of_capacity([all_, joined]) == pytest.approx(7.6 / 11.0), "who ignores the newcomer loses"


def test_who_does_more_than_his_part_stands_out() -> None:
    """A slow peer that gets as much as a fast one stands out."""
    assert work_over_capacity([[_work("a", 3.0, 1.0), _work("b", 1.0, 1.0)]]) == pytest.approx([0.5 / 0.75, 0.5 / 0.25])


def test_parts_are_of_the_time_in_which_a_peer_was_there() -> None:
    """One peer is there all the time, one only at first, and one only at the end."""
    first = [_work("a", 1.0, 1.0), _work("b", 1.0, 1.0)]
    last = [_work("a", 1.0, 0.5), _work("c", 1.0, 1.0)]
    assert work_over_capacity([first, last]) == pytest.approx([1.5 / 1.75, 1.0, 1.0 / 0.75])


def test_a_stage_that_did_nothing_is_one_line() -> None:
    with pytest.raises(DeadlineExceeded, match="no microbatch was committed"):
        work_over_capacity([[_work("a", 1.0, 0.0)]])


@pytest.mark.parametrize(
    ("share", "ratios", "passed"),
    [
        (0.96, [0.8, 1.1], True),
        (0.94, [1.0, 1.0], False),
        (0.96, [0.7, 1.0], False),
        (0.96, [1.0, 1.4], False),
        (None, [], None),
    ],
)
def test_who_starves_herds_or_idles_has_not_passed(
    share: float | None, ratios: list[float], passed: bool | None
) -> None:
    assert judge(share, ratios)["passed"] is passed


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seconds": 0.1}, "--seconds must be at least 2"),
        ({"policies": ("queue", "queue")}, "--policies must name at least one, and none twice"),
        ({"microbatch_seconds": 0.0}, "--microbatch-seconds must be positive"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Options(**options)


@pytest.fixture
def router(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Router:
    """A router with three peers, one of which claims to be much faster, and with another rule than the queue's."""
    for name in ("_charge", "_enter"):
        monkeypatch.setattr(PeerQueue, name, getattr(PeerQueue, name))  # This is put back at the end of the test.
    cost = COSTS[request.param]
    assert cost is not None
    replace_choice(cost)
    router = Router(ManualClock(), random.Random(0))
    router.update(
        0,
        [
            PeerRecord(
                peer_id=f"{number:040x}",
                announced_at=0.0,
                stage=0,
                endpoint="host:1",
                state=PeerState.SERVING,
                samples_per_second=100.0 if number == 0 else 1.0,
            )
            for number in range(3)
        ],
    )
    return router


def _choose(router: Router, times: int) -> list[int]:
    """Choose a peer several times; each answers at once, and has nothing more to do."""
    chosen = []
    for _ in range(times):
        record = router.choose(0, 8)
        assert record is not None
        chosen.append(int(record.peer_id, 16))
        router.succeeded(
            PeerId(record.peer_id), Observation(num_samples=8, busy_seconds=1.0, link_seconds=None, queue_length=0)
        )
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
