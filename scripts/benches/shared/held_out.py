"""The loss of whole models on held-out text.

Used by the benches that compare ways to train. Never trains.
"""

from collections.abc import Mapping

import torch

from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.model.transformer import build_transformer
from swarm.training import samples

NUM_SAMPLES = 2048
NUM_BATCHES = 16


class HeldOut:
    """Measures different weights of one model on the same samples."""

    def __init__(self, config: RunConfig, data: Microbatches) -> None:
        self._model = build_transformer(config, device="cpu")
        batches = data.held_out(NUM_SAMPLES)
        merged = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        pieces = {name: tensor.chunk(NUM_BATCHES) for name, tensor in merged.items()}
        self._batches = [dict(zip(pieces, each, strict=True)) for each in zip(*pieces.values(), strict=True)]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the whole model's parameters, by name."""
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def loss(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Mean nats a target with these weights, by their names in the whole model."""
        self._model.load_state_dict(dict(weights))
        losses = [float(self._model.summed_loss(batch)) for batch in self._batches]
        return sum(losses) / sum(samples.amount(batch).targets for batch in self._batches)
