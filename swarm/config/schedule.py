"""The schedule of the learning rate: the shapes that there are, what each needs, its rates, and it in words.

Rates have the same bits on every machine, as steps have (training/optim.py): a cosine of a C library may differ in the
last bit.
"""

import math
from typing import TYPE_CHECKING, Literal, assert_never

from swarm.config.checks import require

if TYPE_CHECKING:
    from swarm.config.optimizer import OptimizerConfig

Schedule = Literal["auto", "constant", "linear", "cosine", "cosine-restarts"]
COSINE_TERMS = 14
"""How many terms of the cosine's series are summed. Those after them add less than 1e-23 up to a quarter turn."""


def check_schedule(config: "OptimizerConfig") -> None:
    """Raise ValueError unless the configuration has what its schedule needs."""
    match config.schedule:
        case "constant" | "auto":
            pass
        case "linear" | "cosine":
            require(
                config.total_samples > max(0, config.warmup_samples),
                f"optimizer.schedule = {config.schedule!r} needs optimizer.total_samples above "
                "optimizer.warmup_samples",
            )
        case "cosine-restarts":
            needs = "optimizer.schedule = 'cosine-restarts' needs optimizer.restart_samples"
            require(config.restart_samples > 0, needs)
        case other:
            assert_never(other)


def learning_rate(config: "OptimizerConfig", run_samples: int) -> float:
    """The rate after `run_samples` samples of the whole run: linear warm-up, then the configured shape."""
    if run_samples < config.warmup_samples:
        return config.learning_rate * (run_samples + 1) / (config.warmup_samples + 1)
    since_warmup = run_samples - config.warmup_samples
    match config.schedule:
        case "auto":
            raise AssertionError("gradient_step has one of the other schedules")
        case "constant":
            return config.learning_rate
        case "linear":
            height = 1.0 - _share_over(config, since_warmup)
        case "cosine":
            height = _cosine_height(_share_over(config, since_warmup))
        case "cosine-restarts":
            height = _cosine_height(since_warmup % config.restart_samples / config.restart_samples)
        case other:
            assert_never(other)
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * height)


def in_words(config: "OptimizerConfig") -> str:
    """The rate and what becomes of it, for the user who begins a run."""
    told = f"{config.learning_rate:g}"
    if config.warmup_samples:
        told += f", reached after {config.warmup_samples} samples"
    match config.schedule:
        case "linear" | "cosine":
            return f"{told}; it falls until {config.total_samples} samples"
        case "constant":
            return f"{told}, which stays: --steps N would let it fall over N steps"
        case "cosine-restarts" | "auto":
            return told
        case other:
            assert_never(other)


def _share_over(config: "OptimizerConfig", since_warmup: int) -> float:
    """How much of the run's part after the warm-up is done, from 0 to 1. For schedules that end with the run."""
    return min(1.0, since_warmup / (config.total_samples - config.warmup_samples))


def _cosine_height(progress: float) -> float:
    """(1 + cos(pi * progress)) / 2, computed as a square, so that it is never below 0."""
    cosine = _cosine(0.5 * math.pi * progress)
    return cosine * cosine


def _cosine(angle: float) -> float:
    total = term = 1.0
    for number in range(1, COSINE_TERMS):
        term *= -angle * angle / ((2 * number - 1) * (2 * number))
        total += term
    return total
