"""The study of ways to choose a peer, at its smallest."""

import gc

import pytest

from swarm.simulation.studies.routing import CHOOSERS, Options, run

SMALL = Options(num_peers=(12,), failure_percent=(1.0,), num_stages=2, num_trainers=2, num_visits=480)


def test_every_way_to_choose_is_measured_and_ours_beats_chance() -> None:
    (setting,) = run(SMALL)["settings"]
    assert (setting["num_peers"], setting["failure_percent"]) == (12, 1.0)
    for name in CHOOSERS:
        assert 20.0 < setting[name]["percent_of_capacity"] < 105.0
        assert 0.0 < setting[name]["p50_seconds"] < setting[name]["p99_seconds"]
    assert setting["ours"]["percent_of_capacity"] > setting["random"]["percent_of_capacity"] + 5.0
    assert gc.isenabled()


def test_the_same_options_give_the_same_figures() -> None:
    assert run(SMALL) == run(SMALL)


@pytest.mark.parametrize("changes", [{"num_peers": (1,)}, {"num_trainers": 0}, {"failure_percent": (-1.0,)}])
def test_what_cannot_be_simulated_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least 2 peers|failure-percent"):
        Options(**changes)  # type: ignore[arg-type]
