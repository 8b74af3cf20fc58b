"""The rows of the bench `wan`: what SWARM's table says of compute and transfer."""

from typing import Any

import pytest

from scripts.benches.simulate.studies.utilisation import (
    GPU_UTILISATION,
    LINK_MEGABITS_PER_SECOND,
    ROUND_TRIPS_MS,
    Layers,
)
from scripts.benches.wan import ROWS, SWARM_BEST, Measured, Options, Row, RowName, _config, _figures

NAMES: list[RowName] = ["base", "xxlarge", "gpt3"]


@pytest.mark.parametrize(
    ("row", "column"), [*zip(ROWS.values(), ["base", "xxlarge", "GPT-3"], strict=True), (SWARM_BEST, "Ours")]
)
def test_shares_are_those_of_the_table(row: Row, column: str) -> None:
    none, *printed = GPU_UTILISATION[column]
    for milliseconds, utilisation in zip(ROUND_TRIPS_MS[1:], printed, strict=True):
        # If everything takes this many times as long, the round trip included, the share stays the same.
        share = row.share(LINK_MEGABITS_PER_SECOND, row.num_merged * milliseconds / 1000)
        assert share == pytest.approx(utilisation / none, rel=0.04)


def test_what_limits_a_row_is_its_compute_or_the_line() -> None:
    # Transfers take 1 s over 500 Mb/s, there and back: half of that each way.
    row = Row(layers=Layers(compute_seconds=0.1, transfer_seconds=1.0))
    assert row.limit(megabits=5000.0) == pytest.approx(10.0)
    assert row.limit(megabits=500.0) == pytest.approx(2.0)
    assert row.share(500.0, 0.1) == pytest.approx(1.1 / 1.2)
    assert row.share(250.0, 0.1) == pytest.approx(2.1 / 2.2)


@pytest.mark.parametrize("name", NAMES)
def test_the_wire_carries_the_rows_bytes_scaled_down(name: RowName) -> None:
    config = _config(Options(), name)
    num_bytes = 2 * config.data.microbatch_size * config.data.sequence_length * config.model.d_model
    assert num_bytes == pytest.approx(ROWS[name].tensor_bytes / ROWS[name].scale, rel=0.01)


def test_shares_are_of_the_same_lines_without_length() -> None:
    measured = [
        Measured(megabits=megabits, round_trip_ms=ms, tokens_per_second=[rate], share_of_line=[0.5])
        for megabits, ms, rate in ((500.0, 0, 100.0), (500.0, 100, 95.0), (80.0, 0, 50.0), (80.0, 100, 25.0))
    ]
    figures = _figures(ROWS["gpt3"], measured)
    assert [row["share"] for row in figures] == [1.0, 0.95, 1.0, 0.5]
    assert figures[1]["swarm_best_share"] == pytest.approx(0.80, abs=0.01)


@pytest.mark.parametrize("round_trips_ms", [(20, 100), (0, -1)])
def test_without_anything_to_compare_with_there_is_no_share(round_trips_ms: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="--round-trips-ms must contain 0"):
        Options(round_trips_ms=round_trips_ms)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"megabits": (500.0, 500.0)}, "--megabits must name at least one, and none twice"),
        ({"rows": ()}, "--rows must name at least one"),
        ({"round_trips_ms": (0, 0)}, "--round-trips-ms must name at least one, and none twice"),
        ({"megabits": (500.0, 0.0)}, "--megabits must be positive"),
        ({"seconds": 0.1}, "--seconds must be at least 2, not 0.1"),
        ({"warm_up_seconds": 0.0}, "--warm-up-seconds must be positive"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Options(**options)
