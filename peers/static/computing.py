"""How one worker computes a batch: microbatch by microbatch, or as one stage of a pipeline. The loop calls it.

Either way gradients are summed in the parameters, and only workers with the last stage know losses. During backward the
gradients are averaged over the axis dp: DDP does this with the last microbatch, and FSDP, which cuts gradients into
parts, with each microbatch.
"""

import contextlib

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from peers.static.batches import Batch
from peers.static.workers import Workers
from swarm.config import RunConfig


class OneByOne:
    """Computes microbatch by microbatch, at a worker that has all layers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        """Add the gradients of `weight` times the sum of all targets' losses, and return that product, a scalar."""
        losses, ddp = [], self._module if isinstance(self._module, DistributedDataParallel) else None
        for number, inputs in enumerate(batch.inputs, 1):
            is_last = number == len(batch.inputs)
            with contextlib.nullcontext() if ddp is None or is_last else ddp.no_sync():
                loss_1: torch.Tensor = self._module(**inputs) * weight
                loss_1.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            losses.append(loss_1.detach())
        return torch.cat(losses).sum()

    def losses(self, batch: Batch) -> torch.Tensor:
        """The loss of each of the batch's N microbatches, summed over its targets [N], without gradients."""
        with torch.no_grad():
            return torch.cat([self._module(**inputs) for inputs in batch.inputs])


class Pipeline:
    """Computes one stage of several, which work on different microbatches at the same time."""

    def __init__(self, module: nn.Module, config: RunConfig, workers: Workers, num_microbatches: int) -> None:
        self._place, self._num_stages = workers.place("pp"), workers.shape.pp
        self._is_last = self._place == self._num_stages - 1
        self._needs_tokens = config.model.bottleneck_dim > 0
        rows, length, width = config.data.microbatch_size, config.data.sequence_length, config.model.hidden_width
        tokens_BT = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden_BTR = torch.empty(rows, length, width, device="meta", requires_grad=True)
        stage = PipelineStage(
            module,
            self._place,
            self._num_stages,
            workers.device,
            input_args=tokens_BT if self._place == 0 else hidden_BTR,
            output_args=torch.empty(1, device="meta", requires_grad=True) if self._is_last else hidden_BTR,
            group=workers.mesh.get_group("pp"),
        )
        self._schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_weighted, scale_grads=False)

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        """Add gradients as OneByOne does. Return 0 unless this is the last stage."""
        losses: list[torch.Tensor] = []
        inputs, others = self._arguments(batch)
        self._schedule.step(*inputs, losses=losses, return_outputs=False, loss_kwargs={"weight": weight}, **others)
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())

    def losses(self, batch: Batch) -> torch.Tensor:
        """The losses, in the form of OneByOne.losses; zeros unless this is the last stage."""
        losses: list[torch.Tensor] = []
        inputs, others = self._arguments(batch)
        with torch.no_grad():
            self._schedule.eval(*inputs, losses=losses, loss_kwargs={"weight": 1.0}, **others)
        return torch.stack(losses) if losses else torch.zeros(len(batch.inputs))

    def _arguments(self, batch: Batch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """This stage's arguments for all microbatches, concatenated."""
        whole = {name: torch.cat([inputs[name] for inputs in batch.inputs]) for name in batch.inputs[0]}
        # The last stage computes the losses itself, but torch's schedule requires a target for each microbatch.
        whole["target"] = whole["microbatch_1"]
        tokens = whole.pop("inputs")
        if not self._is_last:
            del whole["targets_BT"]
        if self._place == 0:
            return [tokens], whole
        return [], {**whole, "tokens_BT": tokens} if self._needs_tokens else whole


def _weighted(loss_1: torch.Tensor, target: torch.Tensor, *, weight: float) -> torch.Tensor:
    return loss_1.sum() * weight
