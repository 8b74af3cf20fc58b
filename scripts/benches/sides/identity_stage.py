"""A stage that does no work, so that a bench can measure everything around it. Peers load it by its name in
`model.custom_class`."""

import torch
from torch import Tensor, nn

from swarm.config import RunConfig
from swarm.model.masks import DropoutKey

VOCABULARY = 2


class Identity(nn.Module):
    """Returns its input. The last stage returns the first two channels, as logits of a vocabulary of two."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        self.is_last = stage == config.stages.num_stages - 1
        # An optimizer needs at least one parameter.
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        """hidden_BTD to logits_BTV at the last stage, else unchanged."""
        return inputs[..., :VOCABULARY] if self.is_last else inputs
