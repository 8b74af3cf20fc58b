"""Sends a training's figures to Weights & Biases and TensorBoard, besides the JSONL file.

Used by the programs that train. Their options say which of the two they report to.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm.config import RunConfig
from swarm.metrics.reporter import Reporter
from swarm.metrics.tensorboard import TensorBoard, require_installed
from swarm.metrics.wandb_run import WandbRun, require_project

_CLOSE_SECONDS = 30.0


class ReportingOptions(Protocol):
    """The options that say where a program that trains reports its figures."""

    @property
    def wandb(self) -> str | None: ...
    @property
    def wandb_online(self) -> bool: ...
    @property
    def tensorboard(self) -> Path | None: ...


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """The reporters that the options asked for; None for the others."""

    wandb: WandbRun | None
    tensorboard: TensorBoard | None

    @property
    def reporters(self) -> Sequence[Reporter]:
        """All reporters, for a MetricsLog."""
        return [reporter for reporter in (self.wandb, self.tensorboard) if reporter is not None]

    def finish(self) -> None:
        """Send what is left, and print how to upload what was only written here. Blocks up to 30 s per reporter."""
        if self.tensorboard is not None:
            self.tensorboard.close(_CLOSE_SECONDS)
        if self.wandb is not None and (command := self.wandb.finish(timeout_seconds=_CLOSE_SECONDS)):
            print(f"To upload this run to Weights & Biases: {command}")


def require_reporters(options: ReportingOptions) -> None:
    """Raise ValueError if an extra is missing or a name is none: `start` comes only once a program has its text."""
    if options.wandb is not None:
        require_project(options.wandb)
    if options.tensorboard is not None:
        require_installed()


def start(options: ReportingOptions, folder: Path, config: RunConfig) -> Reporting:
    """Start what the options ask for.

    Args:
        folder: below which wandb's files go.

    Raises:
        ValueError: an extra is not installed.
        OSError: TensorBoard's folder cannot be made.
    """
    # TensorBoard comes first, because it can fail, and W&B's run would then have begun for nothing.
    tensorboard = None if options.tensorboard is None else TensorBoard(options.tensorboard)
    wandb = None
    if options.wandb is not None:
        values = dataclasses.asdict(config)
        wandb = WandbRun(project=options.wandb, folder=folder, online=options.wandb_online, config=values)
    return Reporting(wandb=wandb, tensorboard=tensorboard)
