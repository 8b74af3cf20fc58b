"""Synthetic traces of preemptible machines."""

import random

from scripts.benches.simulate.fluid.churn import Market, visits

MARKET = Market(num_machines=60, hours=12.0)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert visits(MARKET, random.Random(3)) == visits(MARKET, random.Random(3))
    assert visits(MARKET, random.Random(3)) != visits(MARKET, random.Random(4))


def test_all_machines_are_there_at_first_and_never_more_at_once() -> None:
    trace = visits(MARKET, random.Random(0))
    assert sum(visit.arrives == 0.0 for visit in trace) == MARKET.num_machines
    assert all(visit.leaves > visit.arrives for visit in trace)
    assert [visit.arrives for visit in trace] == sorted(visit.arrives for visit in trace)
    for at in range(0, 12 * 3600, 600):
        assert sum(visit.arrives <= at < visit.leaves for visit in trace) <= MARKET.num_machines


def test_few_can_be_had_in_the_end_and_nobody_leaves_because_it_ends() -> None:
    trace = visits(MARKET, random.Random(0))
    end = MARKET.hours * 3600
    left = [visit for visit in trace if visit.leaves > end]
    assert 0 < len(left) < 0.3 * MARKET.num_machines
    assert all(visit.leaves == float("inf") for visit in left)


def test_waves_take_many_within_minutes_and_give_them_back() -> None:
    calm = Market(num_machines=200, hours=12.0, stay_hours=1e6, shortage_share=0.0)
    trace = visits(calm, random.Random(1))
    gone = [visit.leaves for visit in trace if visit.leaves < float("inf")]
    assert min(gone) > 3600.0, "the first hour is quiet"
    most = max(sum(at <= other < at + 600 for other in gone) for at in gone)
    assert most > 20
    assert len(trace) > 200 + most / 2, "they come back"
