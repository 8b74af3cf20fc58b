"""The published table, as far as the study reproduces it."""

import pytest

from swarm.simulation import published
from swarm.simulation.studies import bandwidth


def test_printed_bandwidths_lie_on_the_grid() -> None:
    for rows in published.BANDWIDTHS.values():
        for row in rows.values():
            for printed in row:
                # One decimal was printed, rounded in either direction.
                point = published.GRID_START * published.GRID_STEP ** round(bandwidth._steps(printed))
                assert printed == pytest.approx(point, abs=0.0551)


def test_a_distance_is_counted_from_the_point_that_was_printed() -> None:
    assert bandwidth.distance_steps(86.8511, 86.8) == pytest.approx(0.0, abs=1e-4)
    assert bandwidth.distance_steps(86.8511 * published.GRID_STEP, 86.8) == pytest.approx(1.0, abs=1e-4)


def test_all_cells_but_the_ones_that_are_explained_are_within_a_step() -> None:
    figures = bandwidth.run(bandwidth.Options())
    assert figures["num_cells"] == 75
    assert {
        (cell["model"], cell["method"], cell["utilisation_percent"]) for cell in figures["not_within_a_step"]
    } == {(model, method, f"{wanted:.0%}") for model, method, wanted in bandwidth.CANNOT}  # fmt: skip
    assert figures["share_within_a_step"] == pytest.approx(74 / 75)
    assert abs(figures["largest_distance_steps"]) < 1.2
    # Ours: whatever is smaller on the wire needs less.
    for rows in figures["ours"].values():
        assert rows["fp16, waiting"]["95%"] > rows["int8, waiting"]["95%"] > rows["int4, waiting"]["95%"]
        assert rows["int4, waiting"]["95%"] > 20 * rows["topk (sparseloco), waiting"]["95%"]
        assert rows["int8, waiting"]["95%"] > rows["int8, overlap 5"]["95%"] > rows["int8, overlap 1, fragments"]["95%"]


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="round_steps must be at least 72"):
        bandwidth.Options(round_steps=71)
    with pytest.raises(ValueError, match="overlap_steps must be"):
        bandwidth.Options(overlap_steps=100)
