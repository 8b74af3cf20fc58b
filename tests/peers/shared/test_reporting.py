"""Weights & Biases as a good, a broken and a hanging module, and TensorBoard. None of them disturbs training."""

import importlib.util
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from peers.shared.reporting import TensorBoard, WandbRun


class _FakeRun:
    def __init__(self, folder: Path) -> None:
        self.id = "abc123"
        self.dir = str(folder / "wandb" / "offline-run-1" / "files")
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


class _FakeWandb(ModuleType):
    def __init__(
        self, run: _FakeRun, *, failure: BaseException | None = None, gate: threading.Event | None = None
    ) -> None:
        super().__init__("wandb")
        self.run, self.failure, self.gate = run, failure, gate
        self.arguments: dict[str, Any] = {}

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> _FakeRun:
        self.arguments = arguments
        if self.gate:
            self.gate.wait(30)
        if self.failure:
            raise self.failure
        return self.run


def _start(folder: Path, *, online: bool = False) -> WandbRun:
    return WandbRun(project="p", folder=folder, online=online, config={"run": "r"})


def test_offline_run_is_fed_and_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = _FakeWandb(_FakeRun(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = _start(tmp_path)
    run.log({"train/loss": 2.0, "val/loss": None}, step=7)
    assert run.close(10)
    told = capsys.readouterr().out
    assert told == f"To upload this run to Weights & Biases: wandb sync {tmp_path}/wandb/offline-run-1\n"
    assert fake.run.logged == [(7, {"train/loss": 2.0})]
    assert fake.run.finished
    assert fake.arguments["mode"] == "offline"
    assert fake.arguments["settings"]["init_timeout"] <= 30


@pytest.mark.parametrize(("step", "goes_on"), [(11, True), (1, False)])
def test_a_training_that_goes_on_in_its_folder_goes_on_in_its_run(
    step: int, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _FakeWandb(_FakeRun(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first in (1, step):
        run = _start(tmp_path)
        run.log({"train/loss": 2.0}, step=first)
        run.close(10)
    assert fake.arguments["resume"] == "allow"
    assert fake.arguments["id"] == ("abc123" if goes_on else None)


@pytest.mark.parametrize("failure", [RuntimeError("no network"), SystemExit(1)])
def test_an_error_is_logged_once(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", _FakeWandb(_FakeRun(tmp_path), failure=failure))
    with caplog.at_level(logging.WARNING):
        run = _start(tmp_path)
        for step in range(3000):
            run.log({"train/loss": 1.0}, step=step)
        assert run.close(10)
    assert len(caplog.records) == 1
    assert capsys.readouterr().out == ""


def test_a_hanging_wandb_stalls_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, hanging = threading.Event(), _FakeRun(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", _FakeWandb(hanging, gate=gate))
    run = _start(tmp_path)
    for step in range(3000):
        run.log({"train/loss": 1.0}, step=step)
    assert not run.close(0.1)
    assert not hanging.logged, "it hangs all the while"
    gate.set()


@pytest.mark.slow
def test_the_real_package_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its interface is the one that the stand-ins have."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = _start(tmp_path)
    run.log({"train/loss": 2.0}, step=1)
    assert run.close(60)
    folder = capsys.readouterr().out.partition("wandb sync ")[2].strip()
    assert list(Path(folder).glob("*.wandb"))


def test_tensorboard_s_own_reader_finds_what_was_reported(tmp_path: Path) -> None:
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


def test_an_error_of_tensorboard_ends_the_reporting_and_nothing_else(
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
