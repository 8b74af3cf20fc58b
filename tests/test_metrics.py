"""The metrics file: names, strict JSON, whole lines."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.metrics import BEGINS, MetricsLog, StepMetrics, plot_loss, read, read_current
from swarm.training.inner_steps import InnerSteps
from swarm.types import Block

METRICS = StepMetrics(
    step=1, loss=5.5, gradient_norm=0.5, learning_rate=1e-3, tokens_per_sec=100.0, total_tokens=4096, step_time=2.0,
    dispatch_time=1.5, aggregate_time=0.25, successful_workers=6, compression_ratio=2.0, alive_peers=7,
    averaged_fraction=1.0, averaged_bytes=1000, exchange_time=0.125, wait_time=0.0625, contribution_norm=0.75,
    attempts=1, aborted_attempts=0, residual_bytes=16,
)  # fmt: skip


def test_a_step_is_a_line_with_the_documented_names(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.step(METRICS)
        # The file can be read while the run goes on.
        (row,) = map(json.loads, path.read_text().splitlines())
    assert row == {
        "step": 1, "train/loss": 5.5, "train/gradient_norm": 0.5, "train/learning_rate": 1e-3,
        "train/tokens_per_sec": 100.0, "train/total_tokens": 4096, "train/step_time": 2.0, "train/dispatch_time": 1.5,
        "train/aggregate_time": 0.25, "train/successful_workers": 6, "train/compression_ratio": 2.0,
        "averaging/alive_peers": 7, "averaging/fraction": 1.0, "averaging/bytes": 1000,
        "averaging/exchange_time": 0.125, "averaging/wait_time": 0.0625, "averaging/contribution_norm": 0.75,
        "averaging/attempts": 1, "averaging/aborted": 0, "averaging/residual_bytes": 16, "val/loss": None,
        "device/memory_bytes": None,
    }  # fmt: skip


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.step(replace(METRICS, loss=math.nan, gradient_norm=math.inf, learning_rate=-math.inf))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row["train/loss"] is row["train/gradient_norm"] is row["train/learning_rate"] is None


def test_a_torn_line_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/lo')
    with MetricsLog(path) as trainer, MetricsLog(path) as launcher:
        trainer.step(replace(METRICS, step=2))
        launcher.event(2, "killed peer 1-0")
    assert [row["step"] for row in read(path)] == [2, 2]
    assert list(read(path))[1] == {"step": 2, "event": "killed peer 1-0"}


def test_the_training_that_a_file_ends_with(tmp_path: Path) -> None:
    """The second went on where the first was, the third is of another run, the fourth went back to a checkpoint."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for first, last in ((0, 7), (7, 9), (0, 5), (3, 4)):
            log.event(first, BEGINS)
            for step in range(first + 1, last + 1):
                log.step(replace(METRICS, step=step))
    steps = [row["step"] for row in read_current(path) if "train/loss" in row]
    assert steps == [1, 2, 3, 4]


def test_every_dataset_has_a_held_out_loss(tmp_path: Path) -> None:
    path, losses = tmp_path / "metrics.jsonl", {"books": 2.5, "code": math.inf}
    with MetricsLog(path) as log:
        log.step(replace(METRICS, validation_loss=3.0, validation_losses=losses))
        log.evaluation(2, 2.75, losses)
    one, other = read(path)
    expected = {"val/loss/books": 2.5, "val/loss/code": None}
    assert {name: one[name] for name in expected} == expected
    assert other == {"step": 2, "val/loss": 2.75, **expected}


def test_shares_of_time_have_names_by_block() -> None:
    named = replace(METRICS, time_shares={Block(1, 2): {"computing_share": 0.5}}).named()
    assert named["time/stage_1.2/computing_share"] == 0.5


def test_inner_steps_have_names_by_block(tmp_path: Path) -> None:
    steps = InnerSteps(configured_samples=16)
    steps.add(16, {3: 1, 4: 1}, newest=4)
    named = replace(METRICS, inner_steps={Block(0): InnerSteps(configured_samples=16), Block(1, 2): steps}).named()
    assert {name: value for name, value in named.items() if name.startswith("inner/")} == {
        "inner/configured_samples": 16,
        **{f"inner/stage_0/{name}": 0 for name in ("steps", "samples_per_step", "staleness", "largest_staleness")},
        "inner/stage_1.2/steps": 1, "inner/stage_1.2/samples_per_step": 16.0, "inner/stage_1.2/staleness": 0.5,
        "inner/stage_1.2/largest_staleness": 1,
    }  # fmt: skip


def test_a_training_that_goes_on_from_an_earlier_step_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        for step in range(6):
            metrics.event(step, "before")
    path.write_text(path.read_text() + '{"step": 7, "torn')
    with MetricsLog(path) as metrics:
        metrics.go_back(3)
        metrics.event(4, "after")
    assert [(row["step"], row["event"]) for row in read(path)] == [
        *((step, "before") for step in range(4)),
        (4, "after"),
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "train/loss": 5.0, "val/loss": None}, {"step": 2, "train/loss": None}],
        [{"step": 1, "train/loss": 5.0, "val/loss": 5.1}, {"step": 1, "event": "killed peer 1-0"}],
        [{"step": 1, "val/loss": 5.1, "val/loss/$x^{$.txt": 5.0, "val/loss/code": None}],
    ],
)
def test_plot(rows: list[dict[str, object]], tmp_path: Path) -> None:
    metrics, image = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_loss(metrics, image)
    assert image.read_bytes().startswith(b"\x89PNG")
