"""Norms with their trained parameters.

Used by attention.py and layers.py. Shape suffixes: B samples, T positions, D width.
"""

from typing import assert_never

import torch
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.functions import rms_norm


class RMSNorm(nn.Module):
    """functions.rms_norm with a trained weight."""

    def __init__(self, width: int, epsilon: float, *, fused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon, self.fused = epsilon, fused

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return rms_norm(hidden_BTD, self.weight, self.epsilon, fused=self.fused)


def make_norm(model: ModelConfig, width: int, *, fused: bool) -> RMSNorm | nn.LayerNorm:
    """A norm of the model's kind. `fused`: see functions.py."""
    match model.norm:
        case "rms":
            return RMSNorm(width, model.norm_epsilon, fused=fused)
        case "layer":
            return nn.LayerNorm(width, model.norm_epsilon)
        case other:
            assert_never(other)
