"""SWARM's table as far as two cells of a column tell the others, and our rows."""

import pytest

from swarm.simulation import published
from swarm.simulation.studies import utilisation


def test_two_cells_tell_the_layers() -> None:
    # Half of the time without a round trip, a quarter with one of 200 ms: 100 of 200 ms, and of 400 ms.
    layers = utilisation.read_off((50.0, 0.0, 0.0, 0.0, 25.0))
    assert layers.compute_seconds == pytest.approx(0.1)
    assert layers.transfer_seconds == pytest.approx(0.1)
    assert layers.tensor_bytes == pytest.approx(0.05 * 62.5e6)


@pytest.mark.parametrize("name", list(published.GPU_UTILISATION))
def test_the_other_cells_follow_within_a_point(name: str) -> None:
    row = published.GPU_UTILISATION[name]
    assert utilisation._one_after_the_other(utilisation.read_off(row)) == pytest.approx(row, abs=1.0)


def test_wire_sizes() -> None:
    assert utilisation.wire_bytes("fp32", 4096) == 4 * 4096
    assert utilisation.wire_bytes("bf16", 4096) == 2 * 4096
    assert 4096 < utilisation.wire_bytes("int8", 4096) < 1.05 * 4096


def test_ours_and_the_same_by_way_of_the_trainer() -> None:
    layers = utilisation.read_off(published.GPU_UTILISATION["xxlarge"])
    num_elements = utilisation._num_elements("xxlarge", layers)
    cell = utilisation._ours(layers, num_elements, "bf16", 0.1, utilisation.Options())
    # As the lines allow: an inner peer sends both tensors, the trainer nine for three boundaries.
    assert cell["direct"] == pytest.approx(100 * layers.compute_seconds / layers.transfer_seconds, abs=1.0)
    assert cell["trainer"] == pytest.approx(cell["direct"] * 2 / 9, abs=1.0)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_stages must be at least 2"):
        utilisation.Options(num_stages=1)
    with pytest.raises(ValueError, match="trainer_megabits_per_second must be positive"):
        utilisation.Options(trainer_megabits_per_second=0.0)
