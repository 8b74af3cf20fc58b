"""TensorBoard's own reader finds what was reported."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from swarm.metrics.tensorboard import TensorBoard


def test_figures_are_read_back(tmp_path: Path) -> None:
    """What is known comes as numbers, under the names of the JSONL file."""
    board = TensorBoard(tmp_path / "deep" / "board")
    board.log({"train/loss": 2.5, "val/loss": None, "note": "text", "averaging/bytes": 1 << 40}, step=7)
    board.log({"train/loss": 2.25}, step=8)
    assert board.close(timeout_seconds=60)
    events = EventAccumulator(str(tmp_path / "deep" / "board"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "averaging/bytes"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 2.5), (8, 2.25)]
    assert events.Scalars("averaging/bytes")[0].value == 1 << 40


def test_a_training_that_goes_on_from_an_earlier_step_has_each_step_once(tmp_path: Path) -> None:
    for first, last in ((1, 5), (3, 6)):
        board = TensorBoard(tmp_path)
        for step in range(first, last + 1):
            board.log({"train/loss": float(10 * first + step)}, step=step)
        assert board.close(timeout_seconds=60)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(1, 11.0), (2, 12.0), (3, 33.0), (4, 34.0), (5, 35.0), (6, 36.0)]


def test_a_missing_extra_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, *arguments: Any) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ValueError, match=r"--tensorboard needs an extra; .*pip install .*'\.\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_a_folder_that_is_a_file_is_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "board").write_text("no folder")
    with pytest.raises(OSError, match="File exists"):
        TensorBoard(tmp_path / "board")


def test_an_error_ends_the_reporting_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils import tensorboard

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", full)
    with caplog.at_level(logging.WARNING):
        board = TensorBoard(tmp_path)
        for step in range(3000):
            board.log({"train/loss": 1.0}, step=step)
        assert board.close(timeout_seconds=60)
    assert caplog.messages == [
        "no more reports to TensorBoard, the training goes on: OSError: [Errno 28] No space left on device"
    ]
