"""How one worker computes a batch: microbatch by microbatch, or as one stage of a pipeline. The loop calls it.

Each sums gradients in the parameters; losses are known to workers that have the end of the model.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from peers.static.batches import Batch
from peers.static.workers import Workers
from swarm.config import RunConfig


class Computing(Protocol):
    """Computes batches."""

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        """Add the gradients of a batch's losses, summed over targets, times `weight`; gives that sum, a scalar."""
        ...

    def losses(self, batch: Batch) -> torch.Tensor:
        """The losses of its microbatches, each summed over its targets [N], without gradients."""
        ...


class OneByOne:
    """All layers are here."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        losses = []
        for number, inputs in enumerate(batch.inputs, 1):
            is_last = number == len(batch.inputs)
            # DDP averages once, with the last microbatch; FSDP's gradients are cut, and so averaged, every time.
            with self._summing(waits=not is_last):
                loss_1: torch.Tensor = self._module(**inputs) * weight
                loss_1.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            losses.append(loss_1.detach())
        return torch.cat(losses).sum()

    def _summing(self, *, waits: bool) -> AbstractContextManager[object]:
        ddp = self._module
        return ddp.no_sync() if waits and isinstance(ddp, DistributedDataParallel) else contextlib.nullcontext()

    def losses(self, batch: Batch) -> torch.Tensor:
        # DDP's own forward would prepare for a backward.
        module: nn.Module = self._module.module if isinstance(self._module, DistributedDataParallel) else self._module
        with torch.no_grad():
            return torch.cat([module(**inputs) for inputs in batch.inputs])


class Pipeline:
    """One stage of several, which work on different microbatches at the same time."""

    def __init__(self, module: nn.Module, config: RunConfig, workers: Workers, num_microbatches: int) -> None:
        self._place, self._num_stages = workers.place("pp"), workers.shape.pp
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

    @property
    def _is_last(self) -> bool:
        return self._place == self._num_stages - 1

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs, others = self._arguments(batch)
        self._schedule.step(
            *inputs, target=others["microbatch_1"], losses=losses, return_outputs=False,
            loss_kwargs={"weight": weight}, **others,
        )  # fmt: skip
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())

    def losses(self, batch: Batch) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs, others = self._arguments(batch)
        with torch.no_grad():
            self._schedule.eval(
                *inputs, target=others["microbatch_1"], losses=losses, loss_kwargs={"weight": 1.0}, **others
            )
        return torch.stack(losses) if losses else torch.zeros(len(batch.inputs))

    def _arguments(self, batch: Batch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """What this stage gets of all microbatches, one behind the other."""
        whole = {name: torch.cat([inputs[name] for inputs in batch.inputs]) for name in batch.inputs[0]}
        tokens = whole.pop("inputs")
        if not self._is_last:
            del whole["targets_BT"]
        if self._place == 0:
            return [tokens], whole
        return [], {**whole, "tokens_BT": tokens} if self._needs_tokens else whole


def _weighted(loss_1: torch.Tensor, target: torch.Tensor, *, weight: float) -> torch.Tensor:
    return loss_1.sum() * weight
