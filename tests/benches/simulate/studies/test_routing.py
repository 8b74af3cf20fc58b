"""The study of ways to choose a peer, at its smallest."""

import gc
import random

import pytest

from scripts.benches.simulate.microbatches.pipeline import Machine, SimulatedPipeline
from scripts.benches.simulate.studies.routing import CHOOSERS, Capacity, Options, run
from scripts.benches.simulate.timeline import Timeline
from swarm.types import PeerId

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


@pytest.mark.parametrize("seconds", [1.0, 30.0, 33.25])
def test_n_seconds_of_peers_that_stay_are_n_times_what_they_manage(seconds: float) -> None:
    timeline = Timeline()
    pipeline = SimulatedPipeline(timeline, random.Random(0), num_stages=1, num_samples=4, max_in_flight=8)
    for number, busy_seconds in enumerate((0.5, 1.0)):
        pipeline.start(Machine(peer_id=PeerId(f"{number:040x}"), stage=0, busy_seconds=busy_seconds, link_seconds=0.0))
    capacity = Capacity(pipeline, 60.0, 60.0 + seconds)
    timeline.run(60.0 + seconds)
    assert capacity.microbatches() == pytest.approx(3.0 * seconds)
