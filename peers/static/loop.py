"""The train loop of a static run, to be read from top to bottom, and what it reports. All workers take the same steps.

A step is what a synchronous swarm calls a round: workers compute the gradient of the mean loss over all targets of some
microbatches, and take one optimizer step with it. A swarm that runs the same microbatches ends with the same weights.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from peers.shared import devices, reporting
from peers.static.checkpoints import Checkpoints, Progress
from peers.static.computing import Batches, CompressedAverage, OneByOne, Pipeline, microbatches_a_worker
from peers.static.options import StaticOptions
from peers.static.run_config import in_shards
from peers.static.spread import Spread
from peers.static.workers import Shape, Workers
from swarm.config import RunConfig
from swarm.config.schedule import learning_rate
from swarm.data.microbatches import HeldOut, HeldOutLoss, averaged
from swarm.errors import Fatal
from swarm.machine.words import counted
from swarm.metrics import BEGINS, MetricsLog, StepMetrics
from swarm.model.functions import fuses
from swarm.model.shards import cut_axis, stretches
from swarm.model.stages import layer_ranges
from swarm.training import optim, samples
from swarm.training.optimizers import gradient_optimizer, is_hidden_matrix
from swarm.training.scaling import LossScale, clip

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4
EXCHANGES = {"zero3": 3, "zero2": 2}
"""The number of times that FSDP exchanges a weight for a microbatch: it gathers weights and scatters gradients."""
SAY_SECONDS = 1.0
"""Least time between two log lines about steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What the loop works with. Only the first worker has a report."""

    config: RunConfig
    workers: Workers
    model: Spread
    computing: OneByOne | Pipeline
    batches: Batches
    checkpoints: Checkpoints
    report: "Report | None"


def train(
    run: Run, held_out: Sequence[HeldOut], *, last_step: int, evaluate_every: int, stops: Callable[[], bool]
) -> bool:
    """Train up to a step, from the newest checkpoint or the beginning. Return whether it was told to stop before.
    `stops` says whether this worker was told to stop. If one was, all stop after their present step. Raises Fatal if
    the gradient is not finite, the checkpoints do not fit, or the last one could not be written."""
    config, shape, parameters = run.config, run.workers.shape, run.model.local_parameters
    optimizer = gradient_optimizer(config, same_bits=False, cut=run.model, fused=fuses(run.workers.device))
    scale = LossScale.of_means(config.model.autocast)
    progress = run.checkpoints.restore(optimizer)
    if run.report is not None:
        run.report.begin(progress.step, last_step)
    # Get this worker's microbatches of the step, and the number of targets of all workers.
    loss, batch = None, run.batches.of_step(progress.run_samples)
    all_targets, num_stopping = run.workers.total(batch.num_targets, stops())
    while progress.step < last_step and num_stopping == 0:
        # Forward and backward. Torch averages gradients over dp, but the sum is needed, so the weight has a factor dp.
        run.model.module.zero_grad()
        weight = scale.factor * shape.dp
        own_loss = run.computing.backward(batch, weight / max(1.0, all_targets / (shape.tp * shape.pp)))
        gradients = run.model.gradients()

        # One exchange sums up the gradient's norm, the mean loss, the next step's targets, and who was told to stop.
        next_batch = run.batches.of_step(progress.run_samples + config.rounds.round_samples)
        scaled_norm, scaled_loss, next_targets, num_stopping = run.workers.total(
            run.model.squared_norm(gradients), float(own_loss), next_batch.num_targets, stops()
        )
        squared_norm, loss = scaled_norm / scale.factor**2, scaled_loss / (weight * shape.tp)
        # That of this step: the next one may have another.
        factor = scale.factor
        if not _accepts(scale, squared_norm, progress.step):
            continue

        # Clip the gradient, and take the step.
        rate = learning_rate(config.gradient_step, progress.run_samples)
        clip(gradients, squared_norm, config.optimizer.clip_norm, scale=factor)
        optim.step(optimizer, {name: parameters[name] for name in gradients}, gradients, rate)
        batch, all_targets = next_batch, next_targets

        # The next step begins with this state. Write a checkpoint of it and evaluate it, where these are due.
        progress = progress.after(config.rounds.round_samples)
        if run.checkpoints.is_due(progress.step):
            progress = run.checkpoints.write(progress, optimizer)
        is_evaluated = evaluate_every > 0 and progress.step % evaluate_every == 0 and progress.step < last_step
        evaluation = evaluate(run, held_out) if is_evaluated else None
        if run.report is not None:
            run.report.step(progress, loss, math.sqrt(squared_norm), rate, evaluation)

    run.checkpoints.write(progress, optimizer)
    is_stopped = progress.step < last_step
    evaluation = None if is_stopped else evaluate(run, held_out)
    if run.report is not None:
        run.report.end(progress.step, loss, evaluation, stopped=is_stopped)
    run.checkpoints.require_written()
    return is_stopped


def _accepts(scale: LossScale, squared_norm: float, step: int) -> bool:
    """Whether a step's gradients, which have this squared norm, can be used; adapts the scale. Raises Fatal if they
    cannot, and a smaller scale would not help."""
    if math.isfinite(squared_norm):
        scale.succeeded()
        return True
    if not scale.halve():
        remedy = "a smaller optimizer.learning_rate" + ("" if scale.is_fixed else ", or --dtype bf16")
        raise Fatal(f"the gradient of step {step} is not finite: take {remedy}")
    logger.info("step %d overflows float16 and is computed again: the loss scale is now %g", step, scale.factor)
    return False


def evaluate(run: Run, held_out: Sequence[HeldOut]) -> HeldOutLoss:
    """The loss on held-out text. All workers call this, and each computes a part."""
    found = [batch for source in held_out for batch in source.batches]
    own: list[float] = []
    for batch in run.batches.of_evaluation(found):
        own += run.computing.losses(batch).tolist()
    sums, place, shape = [0.0] * len(found), run.workers.place("dp"), run.workers.shape
    sums[place :: shape.dp] = own[: len(sums[place :: shape.dp])]
    targets = [samples.amount(batch).targets for batch in found]
    totals = run.workers.total(*sums)
    return averaged(held_out, [total / shape.tp / max(1, count) for total, count in zip(totals, targets, strict=True)])


class Report:
    """Logs steps, and writes their figures to metrics.jsonl and the services that the options name."""

    def __init__(
        self, config: RunConfig, options: StaticOptions, model: Spread, workers: Workers,
        compressed: CompressedAverage | None,
    ) -> None:  # fmt: skip
        """`compressed` averages the gradients; None if torch does, and the bytes sent follow by arithmetic."""
        self._config = config
        self._workers = workers
        self._plain_bytes = round(bytes_sent(config, options, workers.shape, model.parameters))
        self._compressed = compressed
        self._reporters = reporting.start(options, options.metrics.parent, config)
        self._path = options.metrics
        self._metrics = MetricsLog(options.metrics, reporters=self._reporters)
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
        reporting.finish(self._reporters)


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
        num_sums = 2 * sum(len(stretches(model, layers)) for layers in layer_ranges(config)) / shape.pp
        num_sent += num_microbatches * num_sums * 2 * tp * hidden
    if gradient_optimizer(config, same_bits=False).steps_whole_matrices:
        # Matrices that are cut are gathered for the step.
        matrices = {name: value for name, value in parameters.items() if is_hidden_matrix(name, value.shape)}
        num_sent += dp * _size(matrices) if options.fsdp else 0.0
        num_sent += (shape.tp - 1) * _size({name: matrices[name] for name in matrices if cut_axis(name) is not None})
    # Every stage except the last sends activations, and every stage except the first sends gradients.
    return num_sent + num_microbatches * 2 * hidden * (shape.pp - 1) / shape.pp


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return FLOAT_BYTES * sum(tensor.numel() for tensor in tensors.values())
