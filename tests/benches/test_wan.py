"""The rows of the bench `wan`: what SWARM's table says of compute and transfer."""

import pytest

from scripts.benches.wan import NUM_MERGED, PAPER_MEGABITS, UTILISATION, Measured, Options, Row, _config, _figures


@pytest.mark.parametrize("name", ["base", "xxlarge", "gpt3"])
def test_two_figures_of_a_row_give_all_the_others(name: str) -> None:
    row, num_merged = Row.of(name), NUM_MERGED[name]
    for milliseconds, utilisation in UTILISATION[name].items():
        # So many times as much of everything, the round trip too, is as long in use.
        modelled = row.utilisation(PAPER_MEGABITS, num_merged * milliseconds / 1000)
        assert modelled == pytest.approx(utilisation, rel=0.05)


def test_what_limits_a_row_is_its_compute_or_the_line() -> None:
    row = Row(compute_seconds=0.1, transfer_bytes=1e6)
    assert row.limit(megabits=1000.0) == pytest.approx(5.0)
    assert row.limit(megabits=8.0) == pytest.approx(1.0)
    assert row.share(8.0, 0.1) == pytest.approx(1.1 / 1.2)


def test_the_wire_carries_the_rows_bytes_scaled_down() -> None:
    config = _config(Options(scale=4.0), "xxlarge")
    num_bytes = 2 * config.data.microbatch_size * config.data.sequence_length * config.model.d_model
    assert num_bytes == pytest.approx(Row.of("xxlarge").transfer_bytes / 4, rel=0.01)


def test_shares_are_of_the_same_lines_without_length() -> None:
    measured = [
        Measured(megabits=megabits, round_trip_ms=ms, tokens_per_second=[rate], share_of_line=[0.5])
        for megabits, ms, rate in ((500.0, 0, 100.0), (500.0, 100, 95.0), (80.0, 0, 50.0), (80.0, 100, 25.0))
    ]
    assert [figures["share"] for figures in _figures("gpt3", measured)] == [1.0, 0.95, 1.0, 0.5]


@pytest.mark.parametrize("round_trips_ms", [(20, 100), (0, -1), ()])
def test_without_anything_to_compare_with_there_is_no_share(round_trips_ms: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="--round-trips-ms must contain 0"):
        Options(round_trips_ms=round_trips_ms)
