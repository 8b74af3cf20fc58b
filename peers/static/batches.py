"""Batches: the microbatches, all of one shape, that one worker computes in a step or in an evaluation.

A step has the microbatches of a swarm's round, dealt to the workers of the axis dp in turns. Every worker must compute
the same number of them, because workers exchange data in each microbatch. So batches are filled up with microbatches
without targets, which add neither loss nor gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from peers.static.workers import Shape, Workers
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.model.loss import NO_TARGET
from swarm.training import samples
from swarm.training.samples import TOKENS, Samples

NO_DROPOUT = -1
"""Used in the place of a microbatch's number where there must be no dropout."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Several microbatches.

    Attributes:
        inputs: for each microbatch, the arguments of a Part with all layers of the model.
        num_targets: how many targets all microbatches together have.
    """

    inputs: Sequence[dict[str, torch.Tensor]]
    num_targets: int


def microbatches_a_worker(config: RunConfig, shape: Shape) -> int:
    """How many microbatches each worker computes of a step: in a pipeline at least as many as it has stages."""
    return max(-(-config.microbatches_per_round // shape.dp), shape.pp)


class Batches:
    """The batches of one worker."""

    def __init__(self, config: RunConfig, data: Microbatches, workers: Workers) -> None:
        self._config = config
        self._data = data
        self._place, self._dp = workers.place("dp"), workers.shape.dp
        self._device = workers.device
        self.size = microbatches_a_worker(config, workers.shape)

    def of_step(self, step: int) -> Batch:
        """This worker's microbatches of a step."""
        num = self._config.microbatches_per_round
        numbers = range(step * num + self._place, (step + 1) * num, self._dp)
        return self._batch([self._data.samples(number) for number in numbers], numbers)

    def of_evaluation(self, held_out: Sequence[Samples]) -> list[Batch]:
        """This worker's batches of held-out samples, without dropout. Every worker has the same number of batches."""
        num_batches = -(-len(held_out) // (self._dp * self.size))
        own = held_out[self._place :: self._dp]
        parts = [own[first * self.size : (first + 1) * self.size] for first in range(num_batches)]
        return [self._batch(part, [NO_DROPOUT] * len(part)) for part in parts]

    def _batch(self, found: Sequence[Samples], numbers: Sequence[int]) -> Batch:
        inputs = [self._inputs(one, number) for one, number in zip(found, numbers, strict=True)]
        if len(inputs) < self.size:
            filler = self._inputs(self._data.samples(0), NO_DROPOUT)
            filler["targets_BT"] = torch.full_like(filler["targets_BT"], NO_TARGET)
            inputs += [filler] * (self.size - len(inputs))
        return Batch(inputs=inputs, num_targets=sum(samples.amount(one).targets for one in found))

    def _inputs(self, found: Samples, number: int) -> dict[str, torch.Tensor]:
        tensors = {"inputs": found[TOKENS][:, :-1].long(), "targets_BT": samples.targets(found, NO_TARGET)}
        if (documents_BT := samples.documents(found)) is not None:
            tensors["documents_BT"] = documents_BT
        # The last microbatch of held-out samples may have fewer rows, so it is padded.
        rows = self._config.data.microbatch_size - len(tensors["inputs"])
        filled = {
            name: F.pad(tensor, (0, 0, 0, rows), value=NO_TARGET if name == "targets_BT" else 0).to(self._device)
            for name, tensor in tensors.items()
        }
        return {**filled, "microbatch_1": torch.tensor([number])}
