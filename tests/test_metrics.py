"""The metrics file: names, strict JSON, whole lines."""

import json
import math
from dataclasses import replace
from pathlib import Path

from swarm.metrics import BEGINS, MetricsLog, StepMetrics, read, read_current
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


def test_shares_of_time_have_names_by_block_and_peer() -> None:
    shares = {name * 20: {"computing_share": share} for name, share in (("ab", 0.25), ("cd", 0.75))}
    named = replace(METRICS, time_shares={Block(1, 2): shares}).named()
    assert {name: value for name, value in named.items() if name.startswith("time/")} == {
        "time/stage_1.2/computing_share": 0.5,
        "time/stage_1.2/abababab/computing_share": 0.25,
        "time/stage_1.2/cdcdcdcd/computing_share": 0.75,
    }


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
