"""What a trainer reports of its steps."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from peers.trainer.report import GAP_SECONDS, Report
from swarm.config import RunConfig, Timeline
from swarm.data.microbatches import HeldOutLoss
from swarm.hop.answers import Obstacle
from swarm.machine.clock import Clock
from swarm.metrics import MetricsLog, StepMetrics
from swarm.pipeline.round_watcher import StepReport
from swarm.pipeline.train_loop import Step, StepTotals
from swarm.training.inner_steps import InnerSteps
from swarm.training.round_member import RoundCost
from swarm.types import Block
from tests.support.manual_clock import ManualClock


class Metrics:
    written = "figures"

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def event(self, step: int, text: str) -> None:
        pass

    def evaluation(self, step: int, loss: float, losses: Mapping[str, float]) -> None:
        pass


def _report(folder: Path, clock: Clock | None = None, *, metrics: Metrics | None = None) -> Report:
    return Report(
        Timeline(RunConfig()), steps=9, output=folder, metrics=cast(MetricsLog, metrics or Metrics()),
        console=Console(quiet=True), clock=clock or ManualClock(), remedy=lambda stage: f"start one at {stage}",
    )  # fmt: skip


def _step(
    number: int,
    run_samples: int,
    losses: Sequence[float] = (1.0,),
    inner_steps: Mapping[Block, InnerSteps] | None = None,
) -> Step:
    figures: dict[str, Any] = {name: 0 for name in StepReport.__dataclass_fields__}
    known = {"run_samples": run_samples, "cost": RoundCost(), "inner_steps": inner_steps or {}, "time_shares": {}}
    report = StepReport(**{**figures, **known})
    return Step(number=number, seconds=2.0, totals=StepTotals(losses=[(loss, 1) for loss in losses]), report=report)


def test_a_speed_is_never_negative(tmp_path: Path) -> None:
    """DiLoCo's rounds are of unequal length, and a stage that came back from a checkpoint has lost some samples."""
    config, metrics = RunConfig(), Metrics()
    report = _report(tmp_path, metrics=metrics)
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
    """Trainers announce the mean, and only finite numbers can be announced."""
    metrics = Metrics()
    report = _report(tmp_path, metrics=metrics)
    report.begin(0)
    report.step(_step(1, 8, [loss] * 3), None)
    assert report.figures.loss == metrics.steps[0].loss == loss


def test_why_a_stage_takes_no_work_is_told_once_a_cause_until_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = ManualClock()
    report = _report(tmp_path, clock)
    silent = Obstacle(num_peers=2, num_silent=2, causes="a at 192.0.2.1:5001, b: no answer", seconds=3.2)
    busy = Obstacle(num_peers=2, num_busy=2, causes="a, b: work waits here already")
    for obstacle in (silent, dataclasses.replace(silent, seconds=1.0), Obstacle(num_peers=0), busy, busy):
        report.waiting(Block(1), obstacle)
    assert caplog.messages == [
        "waiting: both peers of stage 1 failed just now (a at 192.0.2.1:5001, b: no answer), tried again in 4 s; if "
        "they run, see that their --port can be reached, and that their --announce is right",
        "waiting: both peers of stage 1 take no work now (a, b: work waits here already)",
    ]
    caplog.clear()
    clock.advance(GAP_SECONDS)
    for obstacle in (silent, Obstacle(num_peers=0), silent, busy):
        report.waiting(Block(1), obstacle)
    expected = "waiting: stage 1 has no peer: start one at 1"
    assert caplog.messages == [expected], "they are announced no longer"
    report.step(_step(1, 8), None)
    clock.advance(GAP_SECONDS)
    report.waiting(Block(1), Obstacle(num_peers=0))
    assert caplog.messages.count(expected) == 2


def test_what_makes_a_stage_learn_badly_is_said_once_and_the_figures_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    report = _report(tmp_path, metrics=metrics)
    good, bad = InnerSteps(configured_samples=16), InnerSteps(configured_samples=16)
    good.add(16, {5: 2}, newest=5)
    bad.add(48, {5: 6}, newest=5)
    with caplog.at_level("WARNING"):
        for number in range(3):
            report.step(_step(number, number, inner_steps={Block(0): good, Block(1, 2): bad}), None)
    assert caplog.messages == ["stage 1.2: inner steps took 48 samples, and rounds.inner_batch_samples is 16"]
    assert metrics.steps[-1].named()["inner/stage_1.2/samples_per_step"] == 48.0


@pytest.mark.parametrize(("interrupted", "told"), [(True, "stopped at step 3"), (False, "finished at step 3")])
def test_a_validation_loss_of_an_earlier_step_is_told_with_that_step(
    interrupted: bool, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that is told to stop does not wait for another evaluation."""
    report, found = _report(tmp_path), HeldOutLoss(mean=2.5, by_source={"books": 2.5})
    report.begin(0)
    report.step(_step(2, 2), found)
    report.step(_step(3, 3), None)
    report.goodbye(interrupted=interrupted)
    assert capsys.readouterr().out.startswith(f"{told}, loss 1.000, validation loss 2.500 at step 2; ")
    report.evaluated(found)
    report.goodbye(interrupted=interrupted)
    assert capsys.readouterr().out.startswith(f"{told}, loss 1.000, validation loss 2.500; ")
