"""The matrices of a layer: trained themselves, or frozen with a trained adapter beside them (LoRA, arXiv 2106.09685).

Used by attention.py and layers.py; adapters.py adds the adapters. An adapter reads what its matrix reads, and its
output is added: y = W x + alpha / rank * B A x. Training begins with B = 0, so with the model as it was.

Shape suffixes: B samples, T positions, D inputs, E outputs, R rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import LoraConfig
from swarm.model.functions import product
from swarm.model.masks import DropoutKey, dropout


class Adapter(nn.Module):
    """Two thin matrices, named A and B as in the paper."""

    def __init__(self, lora: LoraConfig, a_RD: nn.Parameter, num_outputs: int, site: str) -> None:
        """
        Args:
            a_RD: the matrix that reads, which several adapters may have in common.
            site: names its dropout, which those have in common too.
        """
        super().__init__()
        self._scale, self._probability, self._site = lora.scale, lora.dropout, site
        self.a = a_RD
        self.b = nn.Parameter(torch.empty(num_outputs, lora.rank, device=a_RD.device))

    def forward(self, hidden_BTD: Tensor, key: DropoutKey | None) -> Tensor:
        narrow_BTR = F.linear(dropout(hidden_BTD, self._probability, key, self._site), self.a)
        return F.linear(narrow_BTR, self.b) * self._scale


class Projection(nn.Linear):
    """A matrix, perhaps with a bias, perhaps with an adapter."""

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)
        self.adapter: Adapter | None = None

    def adapt(self, adapter: Adapter) -> None:
        """Add an adapter."""
        self.adapter = adapter

    def forward(self, hidden_BTD: Tensor, key: DropoutKey | None = None) -> Tensor:
        """
        Args:
            key: names the microbatch, for the adapter's dropout.
        """
        output_BTE = product(hidden_BTD, self.weight, self.bias)
        return output_BTE if self.adapter is None else output_BTE + self.adapter(hidden_BTD, key)
