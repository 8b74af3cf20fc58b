"""The study `bandwidth`: which line a training needs to compute for most of its time.

Reproduces table 4 of Streaming DiLoCo (arXiv 2501.18512) with one model for all its cells, and asks the same of our
rounds, with the sizes of the real codecs. Run by scripts/simulate; docs/simulation.md tells the figures. Nothing is
drawn by chance.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from swarm.config import AveragingConfig, load_preset
from swarm.simulation import plans, published
from swarm.simulation.plans import Training
from swarm.simulation.reductions import Plan, needed_bandwidth
from swarm.simulation.study import StudyOptions

STREAMING_DELAY_STEPS = 1
"""Inner steps behind which the table's `overlap` hides a fragment's reduction."""
CANNOT = {
    ("100B", "streaming-overlap", 0.5): (
        "the printed bandwidth is 3 % above that of a line which never rests; here the line rests between a fragment's "
        "arrival and the end of the backward that makes the next one"
    ),
}
"""Why a cell is further than a step from the paper's, by model, method and utilisation."""


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Options of the study `bandwidth`."""

    round_steps: int = 100
    """Of our own rows: inner steps between two averagings of the same parameter."""
    overlap_steps: int = 5
    """Of our own rows: `averaging.overlap_steps` of those that average the whole model while they train."""

    def __post_init__(self) -> None:
        largest = max(training.num_layers for training in published.TRAININGS.values()) // plans.FRAGMENT_LAYERS
        least = largest * (STREAMING_DELAY_STEPS + 1)
        if self.round_steps < least:
            raise ValueError(
                f"round_steps must be at least {least}, for {largest} fragments in turn, not {self.round_steps}"
            )
        if not 0 <= self.overlap_steps < self.round_steps:
            raise ValueError(f"overlap_steps must be at least 0 and below round_steps, not {self.overlap_steps}")


def run(options: Options) -> dict[str, Any]:
    """Gigabits a second by model, method and utilisation; those of the paper with their distance in grid steps."""
    cells = {
        model: {
            method: _compare(plan, training, published.BANDWIDTHS[model][method])
            for method, plan in _published_plans(training).items()
        }
        for model, training in published.TRAININGS.items()
    }
    distances = {
        (model, method, wanted): cells[model][method][_percent(wanted)]["distance_steps"]
        for model, methods in cells.items()
        for method in methods
        for wanted in published.UTILISATIONS
    }
    far = {cell: distance for cell, distance in distances.items() if abs(distance) > 1}
    return {
        "grid_step": published.GRID_STEP,
        "num_cells": len(distances),
        "num_within_a_step": len(distances) - len(far),
        "share_within_a_step": 1 - len(far) / len(distances),
        "mean_distance_steps": sum(distances.values()) / len(distances),
        "largest_distance_steps": max(distances.values(), key=abs),
        "not_within_a_step": [
            {
                "model": model,
                "method": method,
                "utilisation_percent": _percent(wanted),
                "distance_steps": distance,
                "why": CANNOT.get((model, method, wanted), "not understood"),
            }
            for (model, method, wanted), distance in far.items()
        ],
        "paper": cells,
        "ours": {
            model: {
                name: _needed(plan, training)
                for name, plan in _our_plans(replace(training, steps_between=options.round_steps), options).items()
            }
            for model, training in published.TRAININGS.items()
        },
    }


def distance_steps(ours: float, printed: float) -> float:
    """How many steps of the paper's grid a bandwidth is above the grid's point that was printed."""
    return _steps(ours) - round(_steps(printed))


def _steps(bandwidth: float) -> float:
    return math.log(bandwidth / published.GRID_START) / math.log(published.GRID_STEP)


def _percent(wanted: float) -> str:
    return f"{wanted:.0%}"


def _published_plans(training: Training) -> dict[str, Plan]:
    return {
        "data-parallel": plans.data_parallel(training),
        "diloco": plans.diloco(training),
        "streaming": plans.streaming(training),
        "streaming-overlap": plans.streaming(training, delay_steps=STREAMING_DELAY_STEPS),
        "streaming-overlap-fp4": plans.streaming(
            training, delay_steps=STREAMING_DELAY_STEPS, bits=plans.FP4_BITS
        ),
    }  # fmt: skip


def _our_plans(training: Training, options: Options) -> dict[str, Plan]:
    rows = {}
    for name, averaging in our_codecs().items():
        waiting = replace(averaging, overlap_steps=0)
        training_on = replace(averaging, overlap_steps=options.overlap_steps)
        one_step = replace(averaging, overlap_steps=STREAMING_DELAY_STEPS)
        rows[f"{name}, waiting"] = plans.ours(training, waiting, in_fragments=False)
        rows[f"{name}, overlap {options.overlap_steps}"] = plans.ours(training, training_on, in_fragments=False)
        rows[f"{name}, overlap 1, fragments"] = plans.ours(training, one_step, in_fragments=True)
    return rows


def our_codecs() -> dict[str, AveragingConfig]:
    """Our codecs; the sparse ones as the presets have them."""
    return {
        "fp16": AveragingConfig(codec="fp16"),
        "int8": AveragingConfig(codec="int8"),
        "int4": AveragingConfig(codec="int4"),
        "topk (sparseloco)": load_preset("sparseloco").averaging,
        "dct-topk (targon)": load_preset("targon").averaging,
    }


def _needed(plan: Plan, training: Training) -> dict[str, float]:
    return {
        _percent(wanted): needed_bandwidth(plan, step_seconds=training.step_seconds, wanted=wanted)
        for wanted in published.UTILISATIONS
    }


def _compare(plan: Plan, training: Training, row: tuple[float, ...]) -> Mapping[str, Mapping[str, float]]:
    return {
        column: {"ours": needed, "paper": printed, "distance_steps": distance_steps(needed, printed)}
        for (column, needed), printed in zip(_needed(plan, training).items(), row, strict=True)
    }
