"""A local swarm's output folder: clears it of an earlier run, reads what the trainer writes, and adds the summary.

Used by swarm.py.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from peers.status.live_table import Screen
from peers.status.view import TrainerRow
from swarm.machine import json_file
from swarm.metrics import log as metrics_log
from swarm.metrics.plot import plot_loss


class Output:
    """The folder of one run."""

    def __init__(self, folder: Path, *, goes_on: bool) -> None:
        """
        Args:
            goes_on: whether metrics.jsonl is kept, because the run goes on from a checkpoint.
        """
        self.folder = folder
        self.logs = folder / "logs"
        self.metrics = folder / "metrics.jsonl"
        self.first_step = 0
        """The step of the whole training at which this run began."""
        self._goes_on = goes_on
        self._num_old_rows = 0
        """How many lines of metrics.jsonl an earlier run wrote."""

    def clear(self, logs_in_use: Collection[Path]) -> None:
        """Delete what an earlier run left, now that this one has begun; keep metrics.jsonl if this run goes on."""
        if not self._goes_on:
            self.metrics.unlink(missing_ok=True)
        elif self.metrics.exists() and (rows := list(metrics_log.read(self.metrics))):
            self._num_old_rows, self.first_step = len(rows), rows[-1]["step"]
        stale = {*self.logs.glob("peer-*.log"), self.logs / "trainer.log"} - set(logs_in_use)
        for path in (*stale, *(self.folder / name for name in ("summary.json", "loss.png", "sample.txt"))):
            path.unlink(missing_ok=True)

    @property
    def has_begun(self) -> bool:
        """Whether this run has made a step."""
        return bool(self.trainer_rows())

    def trainer_rows(self) -> tuple[TrainerRow, ...]:
        """The trainer's row in the table, by the last step in metrics.jsonl; empty before its first step."""
        rows = list(metrics_log.read(self.metrics))[self._num_old_rows :] if self.metrics.exists() else []
        steps = [row for row in rows if "train/loss" in row]
        if not steps:
            return ()
        self.first_step, last = steps[0]["step"] - 1, steps[-1]
        rate = last["train/tokens_per_sec"]
        return (TrainerRow(name="trainer", step=last["step"], loss=last["train/loss"], tokens_per_second=rate),)

    def finish(self, figures: Mapping[str, int]) -> None:
        """Add figures to the trainer's summary, and print it, with the sample and where the files are."""
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) | dict(figures)
        json_file.write_object(path, summary)
        # The trainer's plot lacks our last events, so it is drawn again.
        plot_loss(self.metrics, self.folder / "loss.png")
        sample = self.folder / "sample.txt"
        if sample.exists():
            print(sample.read_text(encoding="utf-8"))
        console = Screen()
        console.print_json(data=summary)
        console.print(f"Figures, plot and logs are in {self.folder}", highlight=False, soft_wrap=True)
        for run in sorted((self.folder / "wandb").glob("offline-run-*"))[-1:]:
            console.print(f"To upload this run to Weights & Biases: wandb sync {run}", highlight=False, soft_wrap=True)
