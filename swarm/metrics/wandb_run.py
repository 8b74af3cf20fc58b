"""Reports a training to a Weights & Biases run.

Used by MetricsLog. reporter.py says what happens on an error or with a slow service.
"""

import importlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swarm.metrics.reporter import Figures, Reporter

_INIT_SECONDS = 15.0
_NOT_IN_NAMES = "/\\#?%:"
_LONGEST_NAME = 128


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

    def finish(self, *, timeout_seconds: float) -> str | None:
        """Send what is left and close the run.

        Returns:
            The command that uploads an offline run; None for an online run, or if wandb failed or took too long.
        """
        if not self.close(timeout_seconds) or self._online or self._run_folder is None:
            return None
        return f"wandb sync {shlex.quote(str(self._run_folder))}"

    def _send(self, steps: Iterator[Figures]) -> None:
        wandb = importlib.import_module("wandb")
        self._folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._project,
            dir=str(self._folder),
            config=self._config,
            mode="online" if self._online else "offline",
            settings=wandb.Settings(init_timeout=_INIT_SECONDS, silent=True, console="off"),
        )
        for step, values in steps:
            run.log(values, step=step)
        run_folder = Path(run.dir).parent
        run.finish()
        self._run_folder = run_folder


def require_project(name: str) -> None:
    """Raise ValueError if no project can have this name: wandb would say so only once training has begun."""
    if not name.strip():
        raise ValueError("--wandb must not be empty: it takes the name of a project")
    if wrong := [character for character in name if character in _NOT_IN_NAMES]:
        raise ValueError(f"--wandb {name}: the name of a project has no {wrong[0]!r}")
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"--wandb takes a name of at most {_LONGEST_NAME} characters, not {len(name)}")
