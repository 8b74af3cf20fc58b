"""The study of ways to choose a peer, at its smallest."""

import gc

import pytest

from scripts.benches.simulate.studies.routing import CHOOSERS, Options, run

SMALL = Options(num_peers=(12,), failure_percent=(1.0,), num_stages=2, num_trainers=2, num_visits=480, num_seeds=2)


@pytest.mark.slow
def test_every_way_to_choose_is_measured_and_ours_beats_chance() -> None:
    (setting,) = run(SMALL)["settings"]
    assert (setting["num_peers"], setting["failure_percent"]) == (12, 1.0)
    for name in CHOOSERS:
        assert 20.0 < setting[name]["percent_of_capacity"] < 105.0
        assert 0.0 < setting[name]["p50_seconds"] < setting[name]["p99_seconds"]
        assert setting[name]["spread"]["percent_of_capacity"] > 0.0, "two runs, which differ"
    assert setting["ours"]["percent_of_capacity"] > setting["random"]["percent_of_capacity"] + 5.0
    assert gc.isenabled()
