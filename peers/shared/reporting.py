"""Sends a training's figures to Weights & Biases and TensorBoard, besides the JSONL file."""

import dataclasses
import importlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from peers.shared.run_options import ReportingOptions
from swarm.config import RunConfig
from swarm.machine import extras
from swarm.metrics import Figures, Reporter

ID_FILE = "wandb-run"
"""The file, in the folder for wandb's files, with the run's id."""
_INIT_SECONDS = 15.0


class WandbRun(Reporter):
    """Sends figures to one run: to a local folder, or to the service when `online`."""

    def __init__(self, *, project: str, folder: Path, online: bool, config: Mapping[str, Any]) -> None:
        """Start the thread and return at once; wandb's files go below `folder`."""
        self._project = project
        self._folder = folder
        self._online = online
        self._config = dict(config)
        self._run_folder: Path | None = None
        super().__init__("wandb")

    def close(self, timeout_seconds: float) -> bool:
        """Send what is left and close the run. Unless wandb failed or took too long, print how to upload an offline
        run."""
        is_closed = super().close(timeout_seconds)
        if is_closed and not self._online and self._run_folder is not None:
            print(f"To upload this run to Weights & Biases: wandb sync {shlex.quote(str(self._run_folder))}")
        return is_closed

    def _send(self, steps: Iterator[Figures]) -> None:
        wandb = importlib.import_module("wandb")
        self._folder.mkdir(parents=True, exist_ok=True)
        first = next(steps, None)
        # A training that goes on after its beginning, in the same folder, goes on in the same run.
        id_file, goes_on = self._folder / ID_FILE, first is not None and first[0] > 1
        run = wandb.init(
            id=id_file.read_text(encoding="utf-8").strip() if goes_on and id_file.exists() else None,
            resume="allow",
            project=self._project,
            dir=str(self._folder),
            config=self._config,
            mode="online" if self._online else "offline",
            settings=wandb.Settings(init_timeout=_INIT_SECONDS, silent=True, console="off"),
        )
        id_file.write_text(f"{run.id}\n", encoding="utf-8")
        for step, values in chain([] if first is None else [first], steps):
            run.log(values, step=step)
        run_folder = Path(run.dir).parent
        run.finish()
        self._run_folder = run_folder


class TensorBoard(Reporter):
    """Writes the figures of a training into a folder, under the names that they have in the JSONL file."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, start the thread and return at once. Raises ValueError, of one line, if the extra is
        missing, and OSError if the folder cannot be made."""
        require_installed()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        super().__init__("TensorBoard")

    def _send(self, steps: Iterator[Figures]) -> None:
        # It is imported here, because that takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        writer: SummaryWriter | None = None
        try:
            for step, values in steps:
                # Where training goes on from an earlier step, this hides what was written of later ones.
                writer = writer or SummaryWriter(self._folder, purge_step=step)
                for name, value in values.items():
                    if isinstance(value, int | float):
                        writer.add_scalar(name, value, step)
        finally:
            if writer is not None:
                writer.close()


def require_installed() -> None:
    """Raise ValueError, with one line, if the extra is missing."""
    extras.require("--tensorboard", "an extra", "tensorboard", modules=["tensorboard"])


_CLOSE_SECONDS = 30.0


def require_reporters(options: ReportingOptions) -> None:
    """Raise ValueError if an extra is missing: `start` comes only once a program has its text."""
    if options.tensorboard is not None:
        require_installed()


def start(options: ReportingOptions, folder: Path, config: RunConfig) -> Sequence[Reporter]:
    """Start what the options ask for. wandb's files go below `folder`. Raises ValueError if an extra is not installed,
    and OSError if TensorBoard's folder cannot be made."""
    reporters = list[Reporter]()
    # TensorBoard comes first, because it can fail, and W&B's run would then have begun for nothing.
    if options.tensorboard is not None:
        reporters.append(TensorBoard(options.tensorboard))
    if options.wandb is not None:
        values = dataclasses.asdict(config)
        reporters.append(WandbRun(project=options.wandb, folder=folder, online=options.wandb_online, config=values))
    return reporters


def finish(reporters: Sequence[Reporter]) -> None:
    """Send what is left. Blocks up to 30 s per reporter."""
    for reporter in reporters:
        reporter.close(_CLOSE_SECONDS)
