"""Figures over time: means over a bounded number of spans."""

import pytest

from peers.dashboard.series import Series


def _filled(series: Series, *values: float | None, every: float = 1.0) -> Series:
    for number, value in enumerate(values):
        series.add(1000.0 + number * every, {"loss": value})
    return series


def test_a_span_has_the_mean_of_what_is_known_of_it() -> None:
    series = _filled(Series(span_seconds=4.0, max_spans=9), 1.0, 3.0, None, 5.0, None, None, None, None, 7.0)
    assert series.at == [1000.0, 1004.0, 1008.0]
    assert series.columns == {"loss": [3.0, None, 7.0]}


def test_a_figure_that_comes_later_was_not_known_before() -> None:
    series = _filled(Series(span_seconds=1.0, max_spans=9), 1.0, 2.0)
    series.add(1002.0, {"step": 5.0})
    assert series.columns == {"loss": [1.0, 2.0, None], "step": [None, None, 5.0]}


def test_a_clock_that_is_set_back_does_not_turn_time_around() -> None:
    series = _filled(Series(span_seconds=1.0, max_spans=9), 1.0, 2.0)
    series.add(900.0, {"loss": 4.0})
    assert (series.at, series.columns) == ([1000.0, 1001.0], {"loss": [1.0, 3.0]})


def test_the_newest_spans_are_kept() -> None:
    series = _filled(Series(span_seconds=1.0, max_spans=3), 1.0, 2.0, 3.0, 4.0, 5.0)
    assert (series.at, series.columns) == ([1002.0, 1003.0, 1004.0], {"loss": [3.0, 4.0, 5.0]})


def test_spans_that_coarsen_keep_the_whole_time() -> None:
    series = _filled(Series(span_seconds=1.0, max_spans=8, coarsens=True), *map(float, range(100)))
    assert len(series.at) <= 8
    assert (series.at[0], series.span_seconds) == (1000.0 - 1000.0 % series.span_seconds, 16.0)
    known = [value for value in series.columns["loss"] if value is not None]
    assert known == sorted(known)
    assert known[-1] > 90.0


def test_values_without_their_spans_are_refused() -> None:
    with pytest.raises(ValueError, match="as many values"):
        Series(span_seconds=1.0, max_spans=9, at=[1.0], columns={"loss": []})
