"""Records and claims as a layout: which peer counts at which stage."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.rebalancing.decision import choose_span, decide
from swarm.rebalancing.layout import all_spans, comes_before, layout_of, newcomers_before, without_choosing
from swarm.types import Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState
from tests.rebalancing.places import by_block, span

COSTS = by_block([1.0, 2.0, 1.0])


def _id(number: int) -> PeerId:
    return PeerId(f"{number:040x}")


def _record(number: int, stage: int, **fields: Any) -> PeerRecord:
    values = {
        "peer_id": _id(number), "announced_at": 100.0, "stage": stage, "endpoint": "192.0.2.1:1",
        "state": PeerState.SERVING, "samples_per_second": 6.0, "movable": True,
    }  # fmt: skip
    return PeerRecord.model_validate({**values, **fields})


def _claim(number: int, stage: int, from_stage: int | None = None, **fields: Any) -> ClaimRecord:
    values = {
        "peer_id": _id(number), "announced_at": 100.0, "stage": stage, "from_stage": from_stage,
        "state": ClaimState.PENDING, "claimed_at": 100.0,
    }  # fmt: skip
    return ClaimRecord.model_validate({**values, **fields})


def _by_stage(*records: PeerRecord) -> dict[Block, list[PeerRecord]]:
    return {block: [record for record in records if record.block == block] for block in COSTS}


def test_a_peer_on_its_way_counts_where_it_goes_with_what_it_will_manage_there() -> None:
    records = _by_stage(_record(1, 0), _record(2, 0), _record(3, 1), _record(4, 2))
    now = layout_of(records, [_claim(1, 1, from_stage=0)], COSTS)
    assert list(now.throughput.values()) == [6.0, 6.0 + 3.0, 6.0]
    assert list(now.num_serving.values()) == [1, 1, 1]
    assert decide(now, _id(1)) is None, "it does not move again before it has arrived"
    withdrawn = layout_of(records, [_claim(1, 1, from_stage=0, state=ClaimState.WITHDRAWN)], COSTS)
    assert list(withdrawn.throughput.values()) == [12.0, 6.0, 6.0]


@pytest.mark.parametrize("movable", [False, True])
def test_a_peer_that_serves_several_stages_counts_at_each(movable: bool) -> None:
    served = [
        _record(1, stage, movable=movable, announced_at=100.0 + stage, samples_per_second=2.0) for stage in (0, 1)
    ]
    now = layout_of(_by_stage(*served, _record(2, 2)), [], COSTS)
    assert list(now.throughput.values()) == [2.0, 2.0, 6.0]
    assert list(now.num_serving.values()) == [1, 1, 1]
    assert now.workers[_id(1)].speed == 6.0, "each sample takes the time of both"
    assert now.workers[_id(1)].movable is movable
    unmeasured = [served[0], _record(1, 1, movable=movable, samples_per_second=0.0)]
    assert layout_of(_by_stage(*unmeasured), [], COSTS).workers[_id(1)].speed == 2.0
    claimed = layout_of(_by_stage(served[1], _record(2, 2)), [_claim(1, 0, num_stages=2)], COSTS)
    assert list(claimed.num_workers.values()) == [1, 1, 1]
    assert list(claimed.num_serving.values()) == [0, 1, 1], "it is about to serve the first one"


def test_a_peer_on_its_way_to_another_span_counts_at_what_it_keeps_and_where_it_goes() -> None:
    records = _by_stage(_record(1, 0, samples_per_second=2.0), _record(1, 1, samples_per_second=2.0), _record(2, 0))
    shifts = layout_of(records, [_claim(1, 1, from_stage=0, from_num_stages=2, num_stages=2)], COSTS)
    assert list(shifts.throughput.values()) == [6.0, 2.0, 2.0]
    assert list(shifts.num_serving.values()) == [1, 1, 0]
    narrows = layout_of(records, [_claim(1, 1, from_stage=0, from_num_stages=2)], COSTS)
    assert list(narrows.throughput.values()) == [6.0, 3.0, 0.0]
    assert not narrows.workers[_id(1)].movable, "not before it has arrived"


def test_blocks_on_one_device_share_its_time_and_others_do_not() -> None:
    records = _by_stage(*(_record(1, stage, device=f"cuda:{stage}", movable=False) for stage in (0, 1)))
    assert list(layout_of(records, [], COSTS).throughput.values()) == [6.0, 6.0, 0.0]


def test_what_a_former_process_of_the_peer_announced_does_not_count() -> None:
    records = _by_stage(_record(1, 0, nonce="a"), _record(1, 1, nonce="b", announced_at=101.0))
    assert list(layout_of(records, [], COSTS).num_serving.values()) == [0, 1, 0]


def test_a_peer_that_has_arrived_is_counted_once_and_where_it_is() -> None:
    old = _record(1, 0, state=PeerState.LEAVING, announced_at=101.0)
    new = _record(1, 2, announced_at=105.0, samples_per_second=4.0)
    claim = _claim(1, 2, from_stage=0, state=ClaimState.CONFIRMED)
    now = layout_of(_by_stage(old, new, _record(2, 0)), [claim], COSTS)
    assert list(now.throughput.values()) == [6.0, 0.0, 4.0]
    assert list(now.num_serving.values()) == [1, 0, 1]
    assert not now.workers[_id(1)].movable, "not before it has said so"


def test_at_the_second_look_only_what_comes_before_counts() -> None:
    records = _by_stage(_record(1, 0), _record(2, 0), _record(3, 0), _record(4, 2), _record(5, 2))
    own = _claim(2, 1, from_stage=0)
    earlier, later = _claim(1, 1, from_stage=0, claimed_at=99.0), _claim(3, 1, from_stage=0, claimed_at=101.0)
    under_way = _claim(5, 1, from_stage=2, claimed_at=102.0, state=ClaimState.CONFIRMED)
    assert list(layout_of(records, [own, later], COSTS, own=own).num_serving.values()) == [3, 0, 2]
    assert list(layout_of(records, [own, earlier], COSTS, own=own).num_serving.values()) == [2, 0, 2]
    assert list(layout_of(records, [own, under_way], COSTS, own=own).num_serving.values()) == [3, 0, 1]
    same_time = _claim(1, 1, from_stage=0)
    assert comes_before(same_time, own)
    assert not comes_before(own, same_time)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=12),
    st.lists(st.integers(90, 95), min_size=12, max_size=12),
    st.integers(0, 2**32),
)
def test_of_all_who_claim_at_once_only_as_many_go_as_there_are_gaps(
    stages: list[int], times: list[int], seed: int
) -> None:
    """All peers decide from the same records, claim, look again, and go or not, as if they had taken turns."""
    costs = by_block([1.0, 1.0, 1.0])
    records = _by_stage(*(_record(number, stage) for number, stage in enumerate(stages)))
    first = layout_of(records, [], costs)
    targets = {number: decide(first, _id(number)) for number in range(len(stages))}
    claims = [
        _claim(number, target[0].stage, from_stage=stages[number], claimed_at=float(times[number]))
        for number, target in targets.items()
        if target is not None
    ]
    # This holds in whichever order they look again, and whether the first ones have confirmed by then or not.
    in_turn = random.Random(seed).sample(claims, len(claims))
    going = [o for o in in_turn if decide(layout_of(records, claims, costs, own=o), PeerId(o.peer_id)) == o.span]
    after = layout_of(records, going, costs)
    best = len(stages) // 3
    assert after.pipeline_throughput >= first.pipeline_throughput
    gaps = sum(max(0, best - stages.count(stage)) for stage in range(3))
    assert len(going) <= gaps
    assert bool(going) == bool(claims), "the first of them finds nothing in its way"
    assert all(
        count >= 1 for count, stage in zip(after.num_serving.values(), range(3), strict=True) if stages.count(stage)
    )


def test_newcomers_at_the_same_time_spread() -> None:
    choosing = [_claim(number, 0, claimed_at=100.0 + number % 3) for number in range(9)]
    costs = by_block([1.0, 1.0, 1.0])
    chosen = []
    for own in choosing:
        now = layout_of({}, without_choosing(choosing), costs, own=own)
        num_before = len(newcomers_before(choosing, own, now))
        chosen.append(choose_span(now, all_spans([tuple(costs)], 1), num_before=num_before))
    assert sorted(chosen) == [span(number // 3) for number in range(9)]  # type: ignore[type-var]  # None would not sort


def test_variants_of_a_stage_are_blocks_of_their_own() -> None:
    costs = {Block(0): 1.0, Block(1): 1.0, Block(1, 1): 1.0}
    records = {Block(0): [_record(1, 0), _record(2, 0)], Block(1): [_record(3, 1)]}
    now = layout_of(records, [], costs)
    assert decide(now, _id(1)) == choose_span(now, all_spans([tuple(costs)], 1)) == (Block(1, 1),)
    gone = layout_of(records, [_claim(1, 1, from_stage=0, variant=1)], costs)
    assert list(gone.throughput.values()) == [6.0, 6.0, 6.0]
