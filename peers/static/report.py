"""Reports a static run's steps: log, metrics.jsonl, Weights & Biases, TensorBoard. Only the first worker has a report.

The names of the figures are those of a swarm's trainer.
"""

import dataclasses
import logging
import math
import time

from peers.shared import devices, reporting
from peers.static.checkpoints import Progress
from peers.static.compressed import CompressedAverage
from peers.static.options import StaticOptions
from peers.static.spread import Spread
from peers.static.traffic import bytes_sent
from peers.static.workers import Workers
from swarm.config import RunConfig
from swarm.data.held_out import HeldOutLoss
from swarm.machine.words import counted
from swarm.metrics.log import BEGINS, MetricsLog, StepMetrics

logger = logging.getLogger(__name__)

SAY_SECONDS = 1.0
"""Least time between two log lines about steps."""


class Report:
    """Logs steps, and writes their figures to metrics.jsonl and the services that the options name."""

    def __init__(
        self,
        config: RunConfig,
        options: StaticOptions,
        model: Spread,
        workers: Workers,
        compressed: CompressedAverage | None,
    ) -> None:
        """
        Args:
            compressed: averages the gradients; None if torch does, and the bytes sent follow by arithmetic.
        """
        self._config = config
        self._workers = workers
        self._plain_bytes = round(bytes_sent(config, options, workers.shape, model.parameters))
        self._compressed = compressed
        self._reporting = reporting.start(options, options.metrics.parent, config)
        self._path = options.metrics
        self._metrics = MetricsLog(options.metrics, reporters=self._reporting.reporters)
        self._said_at = self._stepped_at = time.monotonic()

    def begin(self, step: int, last_step: int) -> None:
        """Log that training begins at this step, and at which it is to end."""
        shape, samples = self._workers.shape, counted(self._config.rounds.round_samples, "sample")
        mesh = ", ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(shape).items() if size > 1)
        workers = counted(math.prod(self._workers.mesh.shape), "worker") + (f" ({mesh})" if mesh else "")
        if step < last_step:
            logger.info("trains from step %d to %d, a step on every %s: %s", step, last_step, samples, workers)
        else:
            logger.info("is at step %d, and was to train to %d: that counts from the run's beginning", step, last_step)
        # A killed run may have gone farther than its last checkpoint.
        self._metrics.go_back(step)
        self._metrics.event(step, BEGINS)
        self._stepped_at = time.monotonic()

    def step(
        self, progress: Progress, loss: float, gradient_norm: float, rate: float, held_out: HeldOutLoss | None
    ) -> None:
        """Report a step.

        Args:
            progress: how far the run is after the step.
            gradient_norm: the gradient's norm before clipping.
            rate: the learning rate.
        """
        num_sent = self._plain_bytes if self._compressed is None else self._compressed.bytes_sent()
        now = time.monotonic()
        seconds, self._stepped_at = max(now - self._stepped_at, 1e-9), now
        length, device = self._config.data.sequence_length, self._workers.device
        tokens_per_second = self._config.rounds.round_samples * length / seconds
        self._metrics.step(
            StepMetrics(
                step=progress.step,
                loss=loss,
                gradient_norm=gradient_norm,
                learning_rate=rate,
                tokens_per_sec=tokens_per_second,
                total_tokens=progress.run_samples * length,
                step_time=seconds,
                dispatch_time=seconds,
                aggregate_time=None,
                successful_workers=math.prod(self._workers.mesh.shape),
                compression_ratio=self._plain_bytes / num_sent if num_sent else None,
                averaged_bytes=2 * num_sent,
                validation_loss=None if held_out is None else held_out.mean,
                validation_losses={} if held_out is None else held_out.of_several,
                device_memory_bytes=devices.most_device_bytes(device) or devices.most_resident_bytes(),
            )
        )
        if held_out is not None or now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            told = "" if held_out is None else f"  validation {held_out.mean:.3f}"
            logger.info("step %d: loss %.3f%s  %s tokens/s", progress.step, loss, told, f"{tokens_per_second:,.0f}")

    def end(self, step: int, loss: float | None, held_out: HeldOutLoss | None, *, stopped: bool) -> None:
        """Print where training has ended, and finish reporting.

        Args:
            loss: the loss of the last step; None if there was no step.
            held_out: the held-out loss at the end; None if training was stopped before.
        """
        told = "" if loss is None else f", loss {loss:.3f}"
        if held_out is not None:
            self._metrics.evaluation(step, held_out.mean, held_out.of_several)
            told += f", validation loss {held_out.mean:.3f}"
        print(f"{'stopped' if stopped else 'finished'} at step {step}{told}; {self._metrics.written} in {self._path}")
        self._reporting.finish()
