"""Writes figures as TensorBoard's event files.

Used by MetricsLog. reporter.py says what happens on an error or with a slow disk.
"""

from collections.abc import Iterator
from pathlib import Path

from swarm.machine import extras
from swarm.metrics.reporter import Figures, Reporter


class TensorBoard(Reporter):
    """Writes the figures of a training into a folder, under the names that they have in the JSONL file."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, start the thread and return at once.

        Raises:
            ValueError: one line, if the extra is missing.
            OSError: the folder cannot be made.
        """
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
