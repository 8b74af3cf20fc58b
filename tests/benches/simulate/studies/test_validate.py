"""The simulated side of `validate`, and what it compares."""

from itertools import pairwise

import pytest

from scripts.benches.simulate.studies.validate import (
    ALONE,
    SETTINGS,
    Setting,
    handing_on_seconds,
    largest_difference_points,
    machines,
    shares,
    simulate,
)

LINK_SECONDS = 0.02


def test_every_way_of_a_long_line_is_as_long() -> None:
    """The ways are from the trainer to the first stage, and from each stage to the next."""
    lengths = [
        machine.link_seconds for machine in machines(Setting(paces=((0.1,),) * 4, round_trip_seconds=0.1), LINK_SECONDS)
    ]
    assert lengths[0] == pytest.approx(0.1 + LINK_SECONDS)
    for above, below in pairwise(lengths):
        assert above + below == pytest.approx(0.1 + LINK_SECONDS)


def test_half_of_the_settings_are_short_of_what_the_peers_can_compute() -> None:
    rates = [
        simulate(setting, 0, link_seconds=LINK_SECONDS, warm_up_seconds=10.0, seconds=50.0)[0] / setting.limit
        for setting in SETTINGS.values()
    ]
    assert sum(rate > 0.95 for rate in rates) == len(rates) / 2
    assert sum(rate < 0.75 for rate in rates) == len(rates) / 2


def test_one_microbatch_in_flight_takes_its_computing_and_its_way() -> None:
    """Peers that know their caller take a microbatch unasked: it goes there and back once for each stage."""
    setting = Setting(paces=((0.05,), (0.05,)), max_in_flight=1, round_trip_seconds=0.1)
    rate, work = simulate(setting, 0, link_seconds=LINK_SECONDS, warm_up_seconds=10.0, seconds=50.0)
    assert 1 / rate == pytest.approx(2 * 4 * 0.05 + 2 * (0.1 + LINK_SECONDS), rel=0.03)
    assert work == ((1.0,), (1.0,))


def test_what_is_left_of_a_lone_microbatch_is_the_handing_on() -> None:
    assert handing_on_seconds([4.0, 1 / 0.22, 5.0]) == pytest.approx(0.02)
    rate, _ = simulate(ALONE, 0, link_seconds=0.02, warm_up_seconds=10.0, seconds=100.0)
    assert handing_on_seconds([rate]) == pytest.approx(0.02, abs=0.001)


def test_work_is_compared_by_shares_of_a_stage() -> None:
    assert shares([[1, 3], [8]]) == ((0.25, 0.75), (1.0,))
    assert largest_difference_points(shares([[1, 3], [8]]), shares([[2, 2], [5]])) == pytest.approx(25.0)
