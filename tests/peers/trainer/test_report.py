"""What a trainer tells of its steps."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from peers.trainer.report import Report
from swarm.config import RunConfig
from swarm.metrics.log import MetricsLog, StepMetrics
from swarm.pipeline.round_watcher import StepReport
from swarm.pipeline.tally import StepTotals
from swarm.pipeline.train_loop import Step
from swarm.training.inner_steps import InnerSteps


class Metrics:
    """Remembers the steps."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def event(self, step: int, text: str) -> None:
        """Nothing is made of it."""


def _step(
    number: int, run_samples: int, losses: Sequence[float] = (1.0,), inner_steps: tuple[InnerSteps, ...] = ()
) -> Step:
    figures: dict[str, Any] = {name: 0 for name in StepReport.__dataclass_fields__}
    report = StepReport(**{**figures, "run_samples": run_samples, "inner_steps": inner_steps})
    return Step(number=number, seconds=2.0, totals=StepTotals(losses=[(loss, 1) for loss in losses]), report=report)


def test_a_speed_is_never_negative(tmp_path: Path) -> None:
    """DiLoCo's rounds are of unequal length, and a stage that came back from a checkpoint has lost some samples."""
    config, metrics = RunConfig(), Metrics()
    report = Report(config, steps=9, output=tmp_path, metrics=cast(MetricsLog, metrics), console=Console(quiet=True))
    report.begin(100)
    usual, length = config.rounds.round_samples, config.data.sequence_length
    speeds = []
    for number, run_samples in enumerate([90 * usual, 91 * usual, 89 * usual, 91 * usual], start=101):
        report.step(_step(number, run_samples), None)
        speeds.append(report.figures.tokens_per_second)
    assert speeds == [usual * length / 2.0, usual * length / 2.0, 0.0, usual * length]
    assert [entry.total_tokens for entry in metrics.steps] == [n * usual * length for n in (90, 91, 89, 91)]


@pytest.mark.parametrize("loss", [1e308, sys.float_info.max])
def test_losses_that_no_sum_can_hold_have_a_mean(loss: float, tmp_path: Path) -> None:
    """Trainers announce it, and what is not finite cannot be announced."""
    metrics = Metrics()
    report = Report(
        RunConfig(), steps=9, output=tmp_path, metrics=cast(MetricsLog, metrics), console=Console(quiet=True)
    )
    report.begin(0)
    report.step(_step(1, 8, [loss] * 3), None)
    assert report.figures.loss == metrics.steps[0].loss == loss


def test_an_empty_stage_and_one_that_cannot_be_reached_are_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = {1: "gpu-box at 192.0.2.1:5001 (no answer)"}
    report = Report(
        RunConfig(), steps=9, output=tmp_path, metrics=cast(MetricsLog, Metrics()), console=Console(quiet=True),
        why_silent=silent.get,
    )  # fmt: skip
    for stage in (0, 1, 1):
        report.waiting(stage)
    silent.clear()
    for stage in (0, 1, 1):
        report.waiting(stage)
    first, second, third = caplog.messages
    assert "stage 0 has no peer; start one with swarm-peer --stage 0" in first
    assert "stage 1 has no peer" in third, "it is announced no longer"
    assert "stage 1 does not answer: gpu-box at 192.0.2.1:5001 (no answer); if it runs, see that its --port" in second


def test_what_makes_a_stage_learn_badly_is_said_once_and_the_figures_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    report = Report(
        RunConfig(), steps=9, output=tmp_path, metrics=cast(MetricsLog, metrics), console=Console(quiet=True)
    )
    good, bad = InnerSteps(configured_samples=16), InnerSteps(configured_samples=16)
    good.add(16, {5: 2}, newest=5)
    bad.add(48, {5: 6}, newest=5)
    with caplog.at_level("WARNING"):
        for number in range(3):
            report.step(_step(number, number, inner_steps=(good, bad)), None)
    assert caplog.messages == ["stage 1: inner steps took 48 samples, and rounds.inner_batch_samples is 16"]
    assert metrics.steps[-1].named()["inner/stage_1/samples_per_step"] == 48.0
