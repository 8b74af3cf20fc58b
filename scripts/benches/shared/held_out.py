"""The loss of whole models on text that nothing is trained on.

Used by the benches that compare how different ways to train learn. Never trains.
"""

from collections.abc import Mapping

import numpy as np
import torch

from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.model.transformer import build_transformer

NUM_SAMPLES = 2048
NUM_BATCHES = 16


class HeldOut:
    """Measures weights of one model on the same samples each time."""

    def __init__(self, config: RunConfig, data: Microbatches) -> None:
        self._model = build_transformer(config, device="cpu")
        samples = np.concatenate(data.held_out(NUM_SAMPLES))
        self._batches = torch.from_numpy(samples).long().chunk(NUM_BATCHES)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the whole model's parameters, by name."""
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def loss(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Mean nats a token with these weights, by their names in the whole model."""
        self._model.load_state_dict(dict(weights))
        losses = [float(self._model.loss(batch)) * len(batch) for batch in self._batches]
        return sum(losses) / sum(len(batch) for batch in self._batches)
