"""What a static run tells of its steps: log, metrics.jsonl, Weights & Biases. The first worker alone has a report.

The names of the figures are those of a swarm's trainer.
"""

import dataclasses
import logging
import math
import resource
import sys
import time
from collections.abc import Callable

import torch

from peers.shared import reporting
from peers.static.checkpoints import Progress
from peers.static.options import StaticOptions
from peers.static.workers import Workers
from swarm.config import RunConfig
from swarm.data.held_out import HeldOutLoss
from swarm.metrics.log import BEGINS, MetricsLog, StepMetrics

logger = logging.getLogger(__name__)

SAY_SECONDS = 1.0
"""Least time between two lines about steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Of one step.

    Attributes:
        progress: after it.
        gradient_norm: before clipping.
    """

    progress: Progress
    loss: float
    gradient_norm: float
    learning_rate: float


class Report:
    """Writes down what it is given."""

    def __init__(
        self, config: RunConfig, options: StaticOptions, workers: Workers, *, plain_bytes: int,
        bytes_sent: Callable[[], int] | None,
    ) -> None:  # fmt: skip
        """
        Args:
            plain_bytes: that a worker sends in a step if gradients are not compressed.
            bytes_sent: gives those that it has sent since it was asked last; None where they are not compressed.
        """
        self._config = config
        self._workers = workers
        self._plain_bytes, self._bytes_sent = plain_bytes, bytes_sent
        self._reporting = reporting.start(options, options.metrics.parent, config)
        self._path = options.metrics
        self._metrics = MetricsLog(options.metrics, reporters=self._reporting.reporters)
        self._said_at = self._stepped_at = time.monotonic()

    def begin(self, step: int) -> None:
        """Training begins at this step."""
        self._metrics.event(step, BEGINS)
        self._stepped_at = time.monotonic()

    def step(self, figures: StepFigures, held_out: HeldOutLoss | None) -> None:
        """A step was made."""
        number = figures.progress.step
        num_sent = self._plain_bytes if self._bytes_sent is None else self._bytes_sent()
        now = time.monotonic()
        seconds, self._stepped_at = max(now - self._stepped_at, 1e-9), now
        length = self._config.data.sequence_length
        rate = self._config.rounds.round_samples * length / seconds
        self._metrics.step(
            StepMetrics(
                step=number,
                loss=figures.loss,
                gradient_norm=figures.gradient_norm,
                learning_rate=figures.learning_rate,
                tokens_per_sec=rate,
                total_tokens=figures.progress.run_samples * length,
                step_time=seconds,
                dispatch_time=seconds,
                aggregate_time=None,
                successful_workers=math.prod(self._workers.mesh.shape),
                compression_ratio=self._plain_bytes / num_sent if num_sent else None,
                averaged_bytes=2 * num_sent,
                validation_loss=None if held_out is None else held_out.mean,
                validation_losses={} if held_out is None else held_out.of_several,
                device_memory_bytes=_most_bytes(self._workers.device),
            )
        )
        if held_out is not None or now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            told = "" if held_out is None else f"  validation {held_out.mean:.3f}"
            logger.info("step %d: loss %.3f%s  %s tokens/s", number, figures.loss, told, f"{rate:,.0f}")

    def evaluated(self, step: int, held_out: HeldOutLoss) -> None:
        """The evaluation at the end."""
        self._metrics.evaluation(step, held_out.mean, held_out.of_several)

    def goodbye(self, step: int, loss: float | None, held_out: HeldOutLoss | None, *, interrupted: bool) -> None:
        """Say where training is, and close what is open."""
        how = "stopped" if interrupted else "finished"
        losses = "" if loss is None else f", loss {loss:.3f}"
        losses += "" if held_out is None else f", validation loss {held_out.mean:.3f}"
        print(f"{how} at step {step}{losses}; figures in {self._path}")
        self._reporting.finish()


def _most_bytes(device: torch.device) -> int:
    """The most memory that this process has held: of its GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
