"""The bench of the ways to train: what it computes from the lines of a training."""

import pytest

from scripts.benches import methods
from scripts.benches.methods import Options


def _rows(losses: list[float], seconds: float) -> list[dict[str, float]]:
    steps = [{"step": n, "train/loss": loss, "train/step_time": seconds} for n, loss in enumerate(losses, start=1)]
    return [*steps[:-1], {**steps[-1], "val/loss": losses[-1]}]


def test_rates_and_seconds_follow_from_the_lines() -> None:
    config = methods.run_config(Options(), "single")
    losses = [4.0 - 0.01 * number for number in range(100)]
    rows = {"single": _rows(losses, 0.5), "dp": _rows(losses, 0.3)}
    found = {name: methods.figures(config, lines, memory_bytes=1) for name, lines in rows.items()}
    methods.compare(found, rows)
    assert found["single"]["tokens_per_second"] == 16 * 64 / 0.5
    assert found["dp"]["scaling_efficiency"] == pytest.approx(0.5 / 0.3 / 2)
    # The loss that `single` has after 80 of its 100 steps.
    assert found["single"]["seconds_to_loss"] == pytest.approx(40.0)
    assert found["dp"]["seconds_to_loss"] == pytest.approx(24.0)
    assert found["dp"]["held_out_loss"] == losses[-1]
