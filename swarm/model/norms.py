"""Norms with their trained parameters.

Used by attention.py and layers.py. Shape suffixes: B samples, T positions, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.functions import rms_norm


class RMSNorm(nn.Module):
    """functions.rms_norm with a trained weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return rms_norm(hidden_BTD, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """Shifts and scales to mean 0 and variance 1, then multiplies by a trained weight and adds a trained bias (arXiv
    1607.06450)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return F.layer_norm(hidden_BTD, self.weight.shape, self.weight, self.bias, self.epsilon)


def make_norm(model: ModelConfig, width: int) -> RMSNorm | LayerNorm:
    """A norm of the model's kind."""
    return (RMSNorm if model.norm == "rms" else LayerNorm)(width, model.norm_epsilon)
