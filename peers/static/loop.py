"""The train loop of a static run, to be read from top to bottom. Every worker runs it, and all take the same steps.

A step is what a synchronous swarm calls a round: workers compute the gradient of the mean loss over all targets of some
microbatches, and take one optimizer step with it. A swarm that runs the same microbatches ends with the same weights.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peers.static.checkpoints import Checkpoints
from peers.static.computing import Batches, OneByOne, Pipeline
from peers.static.report import Report
from peers.static.spread import Spread
from peers.static.workers import Workers
from swarm.config import RunConfig
from swarm.data.microbatches import HeldOut, HeldOutLoss, averaged
from swarm.errors import Fatal
from swarm.model.functions import fuses
from swarm.training import optim, samples
from swarm.training.clipping import clip
from swarm.training.loss_scale import LossScale
from swarm.training.optimizers import gradient_optimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What the loop works with. Only the first worker has a report."""

    config: RunConfig
    workers: Workers
    model: Spread
    computing: OneByOne | Pipeline
    batches: Batches
    checkpoints: Checkpoints
    report: Report | None


def train(
    run: Run, held_out: Sequence[HeldOut], *, last_step: int, evaluate_every: int, stops: Callable[[], bool]
) -> bool:
    """Train up to a step, from the newest checkpoint or the beginning. Return whether it was told to stop before.

    Args:
        stops: whether this worker was told to stop. If one was, all stop after their present step.

    Raises:
        Fatal: the gradient is not finite, the checkpoints do not fit, or the last one could not be written.
    """
    config, shape, parameters = run.config, run.workers.shape, run.model.local_parameters
    optimizer = gradient_optimizer(config, same_bits=False, cut=run.model, fused=fuses(run.workers.device))
    scale = LossScale.of_means(config.model.autocast)
    progress = run.checkpoints.restore(optimizer)
    if run.report is not None:
        run.report.begin(progress.step, last_step)
    # Get this worker's microbatches of the step, and the number of targets of all workers.
    loss, batch = None, run.batches.of_step(progress.step)
    all_targets, num_stopping = run.workers.total(batch.num_targets, stops())
    while progress.step < last_step and num_stopping == 0:
        # Forward and backward. Torch averages gradients over dp, but the sum is needed, so the weight has a factor dp.
        run.model.module.zero_grad()
        weight = scale.factor * shape.dp
        own_loss = run.computing.backward(batch, weight / max(1.0, all_targets / (shape.tp * shape.pp)))
        gradients = run.model.gradients()

        # One exchange sums up the gradient's norm, the mean loss, the next step's targets, and who was told to stop.
        next_batch = run.batches.of_step(progress.step + 1)
        scaled_norm, scaled_loss, next_targets, num_stopping = run.workers.total(
            run.model.squared_norm(gradients), float(own_loss), next_batch.num_targets, stops()
        )
        squared_norm, loss = scaled_norm / scale.factor**2, scaled_loss / (weight * shape.tp)
        # That of this step: the next one may have another.
        factor = scale.factor
        if not _accepts(scale, squared_norm, progress.step):
            continue

        # Clip the gradient, and take the step.
        rate = optim.learning_rate(config.gradient_step, progress.run_samples)
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
