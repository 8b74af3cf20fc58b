"""A swarm of which only the stages' sums are simulated."""

import pytest

from scripts.benches.simulate.fluid.swarm import FluidSwarm
from scripts.benches.simulate.timeline import Timeline


@pytest.fixture
def swarm() -> FluidSwarm:
    """Two peers at stage 0, and two at stage 1; a download takes 10 s."""
    swarm = FluidSwarm(Timeline(), 2, 10.0)
    for peer in range(4):
        swarm.start(peer, peer % 2)
    return swarm


def test_it_manages_what_its_weakest_stage_does(swarm: FluidSwarm) -> None:
    swarm.timeline.run(100.0)
    assert swarm.kept().percent == 100.0
    swarm.leave(0)
    swarm.timeline.run(200.0)
    kept = swarm.kept()
    assert (kept.done, kept.best) == (100 * 2 + 100 * 1, 100 * 2 + 100 * 1), "three peers in two stages do no better"
    swarm.leave(2)
    swarm.timeline.run(300.0)
    kept = swarm.kept()
    assert (kept.done, kept.best) == (300, 400), "one of the two that are left at stage 1 should be at stage 0"


def test_a_peer_that_moves_serves_nobody_while_it_downloads(swarm: FluidSwarm) -> None:
    swarm.leave(0)
    swarm.leave(2)
    swarm.move(1, 0)
    swarm.timeline.run(50.0)
    kept = swarm.kept()
    assert (kept.done, kept.best, swarm.num_serving, swarm.num_moves) == (40, 50, [1, 1], 1)


def test_a_newcomer_serves_after_its_download_and_not_if_it_dies_before(swarm: FluidSwarm) -> None:
    for peer in (4, 5):
        swarm.come(peer)
        swarm.join(peer, peer % 2)
    swarm.timeline.at(5.0, lambda: swarm.leave(5))
    swarm.timeline.run(20.0)
    assert swarm.num_serving == [3, 2]
    kept = swarm.kept()
    assert (kept.done, kept.best) == (40, 40), "five peers in two stages do no better than four"
    assert kept.best_of_present == 5 * 3 + 15 * 2, "six peers, if they had not to download"
