"""A Weights & Biases run that can neither stall nor end the training it reports on.

Used by MetricsLog. wandb is imported, started and fed in a thread of its own behind a bounded queue. Its first error is
logged and ends the reporting.
"""

import importlib
import logging
import queue
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_QUEUE_LENGTH = 1000
_INIT_SECONDS = 15.0


class WandbRun:
    """Sends figures to one run: to a local folder, or to the service when `online`."""

    def __init__(self, *, project: str, folder: Path, online: bool, config: Mapping[str, Any]) -> None:
        """Start the thread and return at once; wandb's files go below `folder`."""
        self._project = project
        self._folder = folder
        self._online = online
        self._config = dict(config)
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(_QUEUE_LENGTH)
        self._run_folder: Path | None = None
        self._thread = threading.Thread(target=self._report, name="wandb", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Hand over a step's figures that are known. They are dropped if wandb is too far behind or gone."""
        known = {name: value for name, value in values.items() if value is not None}
        try:
            self._queue.put_nowait((step, known))
        except queue.Full:
            logger.debug("wandb is behind: step %d is not reported", step)

    def finish(self, *, timeout_seconds: float) -> str | None:
        """Send what is left and close the run.

        Returns:
            The command that uploads an offline run. None for an online run, and if wandb failed or took longer.
        """
        try:
            self._queue.put(None, timeout=timeout_seconds)
        except queue.Full:
            return None
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning("wandb did not finish within %.0f s: its last figures may be missing", timeout_seconds)
            return None
        if self._online or self._run_folder is None:
            return None
        return f"wandb sync {shlex.quote(str(self._run_folder))}"

    def _report(self) -> None:
        try:
            self._send_all()
        except BaseException as error:  # noqa: BLE001 - wandb raises all kinds, SystemExit among them
            self._run_folder = None
            logger.warning("no more reports to wandb, the training goes on: %s: %s", type(error).__name__, error)
            while self._queue.get() is not None:
                pass

    def _send_all(self) -> None:
        wandb = importlib.import_module("wandb")
        self._folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._project,
            dir=str(self._folder),
            config=self._config,
            mode="online" if self._online else "offline",
            settings=wandb.Settings(init_timeout=_INIT_SECONDS, silent=True, console="off"),
        )
        while (item := self._queue.get()) is not None:
            step, values = item
            run.log(values, step=step)
        run_folder = Path(run.dir).parent
        run.finish()
        self._run_folder = run_folder
