"""Reports a static run's steps: log, metrics.jsonl, Weights & Biases, TensorBoard. Only the first worker has a report.

The names of the figures are those of a swarm's trainer.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Mapping

import torch

from peers.shared import devices, reporting
from peers.static.checkpoints import Progress
from peers.static.computing import CompressedAverage, microbatches_a_worker
from peers.static.options import StaticOptions
from peers.static.run_config import in_shards
from peers.static.spread import Spread
from peers.static.workers import Shape, Workers
from swarm.config import RunConfig
from swarm.data.microbatches import HeldOutLoss
from swarm.machine.words import counted
from swarm.metrics import BEGINS, MetricsLog, StepMetrics
from swarm.model.shards import cut_axis, spans
from swarm.model.stages import layer_ranges
from swarm.training.optimizers import is_hidden_matrix, steps_whole_matrices

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4
EXCHANGES = {"zero3": 3, "zero2": 2}
"""The number of times that FSDP exchanges a weight for a microbatch: it gathers weights and scatters gradients."""
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
        """`compressed` averages the gradients; None if torch does, and the bytes sent follow by arithmetic."""
        self._config = config
        self._workers = workers
        self._plain_bytes = round(bytes_sent(config, options, workers.shape, model.parameters))
        self._compressed = compressed
        self._reporting = reporting.start(options, options.metrics.parent, config)
        self._path = options.metrics
        self._metrics = MetricsLog(options.metrics, reporters=self._reporting.reporters)
        self._said_at = self._stepped_at = time.monotonic()

    def begin(self, step: int, last_step: int) -> None:
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
        """Report a step: how far the run is after it, and the gradient's norm before clipping."""
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
        """Print where training has ended, and finish reporting. There is no `loss` if there was no step, and nothing
        held out if training was stopped before."""
        told = "" if loss is None else f", loss {loss:.3f}"
        if held_out is not None:
            self._metrics.evaluation(step, held_out.mean, held_out.of_several)
            told += f", validation loss {held_out.mean:.3f}"
        print(f"{'stopped' if stopped else 'finished'} at step {step}{told}; {self._metrics.written} in {self._path}")
        self._reporting.finish()


def bytes_sent(
    config: RunConfig, options: StaticOptions, shape: Shape, parameters: Mapping[str, torch.Tensor]
) -> float:
    """The bytes that one worker sends in a step with torch's own methods, which exchange in rings. With a pipeline it
    is a mean over the stages. `parameters` are the ones of this worker's stage, cut by tensor parallelism but not
    by FSDP."""
    # A ring of N workers sends (N - 1) / N of a vector to gather or to scatter it, and twice that to sum it.
    dp, tp = (shape.dp - 1) / shape.dp, (shape.tp - 1) / shape.tp
    num_microbatches, model = microbatches_a_worker(config, shape), in_shards(config.model, shape.tp)
    num_sent = (num_microbatches * EXCHANGES[options.fsdp] if options.fsdp else 2) * dp * _size(parameters)
    hidden = FLOAT_BYTES * config.data.tokens_per_microbatch * config.model.hidden_width
    if shape.tp > 1:
        num_sums = 2 * sum(len(spans(model, layers)) for layers in layer_ranges(config)) / shape.pp
        num_sent += num_microbatches * num_sums * 2 * tp * hidden
    if steps_whole_matrices(config):
        # Matrices that are cut are gathered for the step.
        matrices = {name: value for name, value in parameters.items() if is_hidden_matrix(name, value.shape)}
        num_sent += dp * _size(matrices) if options.fsdp else 0.0
        num_sent += (shape.tp - 1) * _size({name: matrices[name] for name in matrices if cut_axis(name) is not None})
    # Every stage except the last sends activations, and every stage except the first sends gradients.
    return num_sent + num_microbatches * 2 * hidden * (shape.pp - 1) / shape.pp


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return FLOAT_BYTES * sum(tensor.numel() for tensor in tensors.values())
