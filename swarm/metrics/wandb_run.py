"""Reports a training to a Weights & Biases run.

Used by MetricsLog. reporter.py says what happens on an error or with a slow service.
"""

import importlib
import shlex
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from swarm.metrics.reporter import Figures, Reporter

ID_FILE = "wandb-run"
"""The file, in the folder for wandb's files, with the run's id."""
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


def require_project(name: str) -> None:
    """Raise ValueError if no project can have this name: wandb would say so only once training has begun."""
    if not name.strip():
        raise ValueError("--wandb must not be empty: it takes the name of a project")
    if wrong := [character for character in name if character in _NOT_IN_NAMES]:
        raise ValueError(f"--wandb {name}: the name of a project has no {wrong[0]!r}")
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"--wandb takes a name of at most {_LONGEST_NAME} characters, not {len(name)}")
