"""SWARM's table, in which two cells of a column give the others, and our rows."""

import dataclasses

import pytest

from scripts.benches.simulate.studies import utilisation
from scripts.benches.simulate.studies.utilisation import Pipeline
from swarm.pipeline.window import MOST_IN_FLIGHT
from swarm.stage.slots import LARGEST_NUM_SLOTS

FAST = 1e12
BASE = Pipeline(
    num_stages=3,
    peers_per_stage=1,
    compute_seconds=0.5,
    tensor_bytes=100.0,
    round_trip_seconds=0.0,
    peer_bytes_per_second=100.0,
    trainer_bytes_per_second=100.0,
)
FREE = dataclasses.replace(BASE, peer_bytes_per_second=FAST, trainer_bytes_per_second=FAST)
"""Layers and lines for which transfers take no time."""


def test_two_cells_tell_the_layers() -> None:
    # A machine computes half of the time without a round trip (100 of 200 ms), and a quarter with one of 200 ms.
    layers = utilisation.read_off((50.0, 0.0, 0.0, 0.0, 25.0))
    assert layers.compute_seconds == pytest.approx(0.1)
    assert layers.transfer_seconds == pytest.approx(0.1)
    assert layers.tensor_bytes == pytest.approx(0.05 * 62.5e6)


@pytest.mark.parametrize("name", list(utilisation.GPU_UTILISATION))
def test_the_other_cells_follow_within_a_point(name: str) -> None:
    row = utilisation.GPU_UTILISATION[name]
    assert utilisation.one_after_the_other(utilisation.read_off(row)) == pytest.approx(row, abs=1.0)


def test_wire_sizes() -> None:
    assert utilisation.wire_bytes("fp32", 4096) == 4 * 4096
    assert utilisation.wire_bytes("bf16", 4096) == 2 * 4096
    assert 4096 < utilisation.wire_bytes("int8", 4096) < 1.05 * 4096


@pytest.mark.parametrize("round_trip_seconds", [0.0, 3.0])
def test_peers_compute_all_the_time_if_lines_cost_nothing(round_trip_seconds: float) -> None:
    pipeline = dataclasses.replace(FREE, round_trip_seconds=round_trip_seconds)
    assert pipeline.direct().utilisation == pytest.approx(1.0)
    assert pipeline.by_way_of_the_trainer().utilisation == pytest.approx(1.0)


def test_directly_the_line_of_an_inner_peer_is_the_limit() -> None:
    # A line carries an activation to one side and a gradient to the other, a second each; computing takes 0.5 s.
    assert BASE.direct().utilisation == pytest.approx(0.5 / 2)
    # If there are two stages, neither has two neighbours that send tensors.
    assert dataclasses.replace(BASE, num_stages=2).direct().utilisation == pytest.approx(0.5 / 1)


def test_by_way_of_the_trainer_its_line_is_the_limit() -> None:
    # The trainer sends up, for each of two boundaries, the activation twice and the gradient once.
    assert BASE.by_way_of_the_trainer().utilisation == pytest.approx(0.5 / 6)


def test_a_trainer_with_a_wide_line_leaves_the_limit_to_the_peers() -> None:
    # An inner peer receives its input twice, and a gradient.
    wide = dataclasses.replace(BASE, trainer_bytes_per_second=FAST)
    assert wide.by_way_of_the_trainer().utilisation == pytest.approx(0.5 / 3)


def test_peers_of_a_stage_share_the_trainer_and_nothing_else() -> None:
    shared = dataclasses.replace(BASE, peers_per_stage=4)
    assert shared.direct().utilisation == pytest.approx(0.5 / 2)
    assert shared.by_way_of_the_trainer().utilisation == pytest.approx(0.5 / 24)


@pytest.mark.parametrize(("peers_per_stage", "most"), [(1, LARGEST_NUM_SLOTS), (5, MOST_IN_FLIGHT)])
def test_our_peers_have_so_many_slots_and_our_trainer_so_many_in_flight(peers_per_stage: int, most: int) -> None:
    far = dataclasses.replace(FREE, round_trip_seconds=60.0, peers_per_stage=peers_per_stage)
    ours = far.direct()
    assert ours.num_in_flight == most
    # The peers compute `most` microbatches in the time that one is under way.
    assert ours.utilisation == pytest.approx(most * 0.5 / peers_per_stage / (3 * 0.5 + 3 * 60.0))
    assert far.by_way_of_the_trainer().utilisation == pytest.approx(1.0)


def test_ours_and_the_same_by_way_of_the_trainer() -> None:
    layers = utilisation.read_off(utilisation.GPU_UTILISATION["xxlarge"])
    cell = utilisation.run(utilisation.Options())["ours"]["xxlarge"]["100 ms"]["bf16"]
    # The lines set the pace: an inner peer sends both tensors, and the trainer nine for three boundaries.
    assert cell["direct"] == pytest.approx(100 * layers.compute_seconds / layers.transfer_seconds, abs=1.0)
    assert cell["trainer"] == pytest.approx(cell["direct"] * 2 / 9, abs=1.0)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_stages must be at least 2"):
        utilisation.Options(num_stages=1)
    with pytest.raises(ValueError, match="trainer_megabits_per_second must be positive"):
        utilisation.Options(trainer_megabits_per_second=0.0)
