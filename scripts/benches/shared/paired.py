"""Measures sides in turns, and compares them repetition by repetition.

Other work on a machine comes and goes. Two turns of one repetition are disturbed about equally, but the medians of two
sides are not. So a ratio is the median of the ratios of all repetitions.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from scripts.benches.shared.common import say

Side = TypeVar("Side")

Turns = Mapping[str, Sequence[float]]
"""The values of each side's turns, one for each repetition."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of one side to another."""

    median: float
    """The median of the repetitions' ratios."""
    extremes: tuple[float, float]
    """The least and the largest of the repetitions' ratios."""
    interval: tuple[float, float]
    """The interval that contains the true median, with a confidence of 95 %."""


def in_turns(
    sides: Mapping[str, Callable[[int], float]], repetitions: int, *, what: str = "", unit: str = "s"
) -> dict[str, list[float]]:
    """Let each side have its turn in every repetition. Every second repetition has the opposite order.

    Args:
        sides: the work of each side, by the side's name. It gets the repetition's number, and returns the measured
            value.
        what: the name of the comparison in lines of progress; empty for no lines.
        unit: the unit of the values.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repetitions):
        for name in order(list(sides), number):
            values[name].append(sides[name](number))
        latest = ", ".join(f"{name} {_rounded(turns[-1])} {unit}" for name, turns in values.items())
        if what:
            say(f"{what}, {number + 1} of {repetitions}: {latest}")
    return values


def order(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """The order of the sides in a repetition. It is reversed in every second one."""
    return sides if number % 2 == 0 else sides[::-1]


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Compare two sides' turns of the same repetitions."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    return Ratio(
        median=statistics.median(ratios), extremes=(min(ratios), max(ratios)), interval=median_interval(ratios)
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval that contains the distribution's median with a confidence of 95 %, by the sign test, for any
    distribution.

    With fewer than six values it contains all of them.
    """
    ordered, num_cut, tail = sorted(values), 0, 0.5 ** len(values)
    while (tail := tail + math.comb(len(ordered), num_cut + 1) * 0.5 ** len(ordered)) <= 0.025:
        num_cut += 1
    return ordered[num_cut], ordered[-1 - num_cut]


def medians(turns: Turns) -> dict[str, float]:
    """The median of each side's turns."""
    return {name: statistics.median(values) for name, values in turns.items()}


def spread(values: Sequence[float]) -> float:
    """The standard deviation of values; zero for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def figures(ratios: Mapping[str, Ratio | Mapping[str, Ratio]]) -> dict[str, Any]:
    """Ratios as a bench reports them: each ratio by its name, and the extremes of all ratios as `ratio_range`."""
    return {
        **{name: _each(found, lambda one: one.median) for name, found in ratios.items()},
        "ratio_range": {name: _each(found, lambda one: list(one.extremes)) for name, found in ratios.items()},
    }


def _each(found: Ratio | Mapping[str, Ratio], value: Callable[[Ratio], Any]) -> Any:
    return value(found) if isinstance(found, Ratio) else {name: value(one) for name, one in found.items()}
