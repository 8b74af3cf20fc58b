"""The rates of a schedule are those of its formula."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest

from swarm.config import OptimizerConfig
from swarm.config.schedule import Schedule, in_words, learning_rate


def test_warmup_rises_linearly_and_is_never_zero() -> None:
    config = OptimizerConfig(learning_rate=0.1, warmup_samples=9, schedule="constant")
    rates = [learning_rate(config, samples) for samples in range(12)]
    assert rates[:10] == pytest.approx([0.01 * (samples + 1) for samples in range(10)])
    assert rates[10:] == [0.1, 0.1]


SCHEDULED = OptimizerConfig(
    learning_rate=0.8, warmup_samples=100, total_samples=500, restart_samples=160, final_fraction=0.25
)
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda since: 1.0,
    "linear": lambda since: 0.25 + 0.75 * (1 - min(since, 400) / 400),
    "cosine": lambda since: 0.25 + 0.75 * (1 + math.cos(math.pi * min(since, 400) / 400)) / 2,
    "cosine-restarts": lambda since: 0.25 + 0.75 * (1 + math.cos(math.pi * math.fmod(since, 160) / 160)) / 2,
}
"""Each schedule's share of the peak, by the samples since the warm-up."""


@pytest.mark.parametrize("schedule", sorted({*get_args(Schedule)} - {"auto"}))
def test_a_schedule_has_the_values_of_its_formula(schedule: Any) -> None:
    config = dataclasses.replace(SCHEDULED, schedule=schedule)
    for samples in range(100):
        assert learning_rate(config, samples) == pytest.approx(0.8 * (samples + 1) / 101, rel=1e-14)
    for since in [*range(1000), 10**9]:
        expected = 0.8 * SHAPES[schedule](since)
        assert learning_rate(config, 100 + since) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("constant", "0.8, reached after 100 samples, which stays: --steps N would let it fall over N steps"),
        ("cosine", "0.8, reached after 100 samples; it falls until 500 samples"),
        ("cosine-restarts", "0.8, reached after 100 samples"),
    ],
)
def test_a_user_is_told_what_becomes_of_the_rate(schedule: Any, told: str) -> None:
    assert in_words(dataclasses.replace(SCHEDULED, schedule=schedule)) == told
