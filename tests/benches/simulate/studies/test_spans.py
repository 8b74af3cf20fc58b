"""The study `spans`, with few seeds."""

import pytest

from scripts.benches.simulate.studies.spans import Options, exit_code, run


def test_what_peers_have_is_used_and_back_soon_after_a_change_with_no_more_blocks_than_it_takes() -> None:
    figures = run(Options(num_seeds=1))
    whole, half = figures["room_for_all"], figures["room_for_half"]
    assert whole["share_of_capacity"] == pytest.approx(1.0)
    assert whole["recovered"] == half["recovered"] == 1.0
    assert whole["most_periods"] < 1.0, "a newcomer has to download"
    assert set(whole["blocks_moved"].values()) == {0}, "all serve all"
    assert half["share_of_capacity"] > 0.95
    assert half["most_periods"] < 3.0
    assert half["blocks_moved"] == {"join": 0, "kill_0": 0, "kill_1": 0, "kill_2": 2}, (
        "the largest had two blocks alone"
    )
    assert exit_code(figures) == 0
    assert exit_code(figures | {"room_for_all": whole | {"share_of_capacity": 0.94}}) == 1
