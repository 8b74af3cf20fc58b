"""How long a peer is expected to take for a sample."""

import dataclasses
import math

import pytest

from swarm.routing.throughput import Link, MovingAverage, Observation, SecondsPerSample
from swarm.types import LARGEST_COUNT
from tests.routing.records import record_of


def _announced(samples_per_second: float, queue_length: int = 0) -> SecondsPerSample:
    seconds = SecondsPerSample()
    seconds.announced(record_of(1, samples_per_second, queue_length=queue_length), at_most=math.inf)
    return seconds


def _observe(
    seconds: SecondsPerSample, *, busy: float, link: float | None = None, num_samples: int = 1, queue_length: int = 0
) -> float | None:
    return seconds.observe(
        Observation(num_samples=num_samples, busy_seconds=busy, link_seconds=link, queue_length=queue_length),
        at_most=math.inf,
    )


def test_average_is_corrected_for_its_start() -> None:
    average = MovingAverage(0.1)
    assert average.value is None
    average.observe(4.0)
    assert average.value == pytest.approx(4.0)
    average.observe(1.0)
    # The textbook form: (0.1 * 0.9 * 4 + 0.1 * 1) / (1 - 0.9 ** 2).
    assert average.value == pytest.approx((0.36 + 0.1) / 0.19)


def test_queue_and_link_add_up() -> None:
    seconds = _announced(0.0)
    observed = _observe(seconds, busy=2.0, link=1.0, num_samples=4, queue_length=3)
    assert observed == pytest.approx(4 * 0.5 + 0.25)
    assert seconds.expected == pytest.approx(observed, rel=1e-4)
    assert _announced(2.0, queue_length=3).expected == pytest.approx(2.0)


def test_announcements_count_only_while_there_are_no_replies() -> None:
    seconds = _announced(1.0)
    for _ in range(100):
        _observe(seconds, busy=1.0)
        seconds.announced(record_of(1, 1000.0), at_most=math.inf)
    assert seconds.expected == pytest.approx(1.0, rel=1e-4)
    for _ in range(50):
        seconds.announced(record_of(1, 1000.0), at_most=math.inf)
    assert seconds.expected == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_nonsense_stays_finite_and_positive(nonsense: float) -> None:
    seconds = _announced(1e300, queue_length=LARGEST_COUNT)
    _observe(seconds, busy=nonsense, link=nonsense)
    assert seconds.expected is not None
    assert 0 < seconds.expected < 1e7


def test_one_hiccup_counts_only_so_much() -> None:
    seconds = _announced(1.0)
    observed = seconds.observe(
        Observation(num_samples=1, busy_seconds=1e4, link_seconds=None, queue_length=0), at_most=10.0
    )
    assert observed == 10.0
    assert seconds.expected == pytest.approx((0.8 + 10.0) / 1.8)


def test_a_line_is_measured_by_what_went_over_it() -> None:
    link = Link()
    assert (link.round_trip_seconds, link.bytes_per_second) == (None, None)
    usual = Observation(num_samples=1, busy_seconds=1.0, link_seconds=None, queue_length=0)
    link.observe(usual)
    assert (link.round_trip_seconds, link.bytes_per_second) == (None, None), "nothing was asked or sent"
    for _ in range(3):
        link.observe(dataclasses.replace(usual, link_seconds=0.5, num_bytes=1000, round_trip_seconds=0.25))
    assert link.round_trip_seconds == pytest.approx(0.25)
    assert link.bytes_per_second == pytest.approx(2000.0)
    link.observe(dataclasses.replace(usual, link_seconds=0.0, num_bytes=1000, round_trip_seconds=-1.0))
    assert 0.0 < (link.round_trip_seconds or 0.0) < 0.25
    assert math.isfinite(link.bytes_per_second or math.inf)
