"""The matrices of a layer: trained themselves, or frozen with a trained adapter beside them (LoRA, arXiv 2106.09685).

An adapter has the same input as its matrix, and its output is added: y = W x + alpha / rank * B A x. Training begins
with B = 0, so the model is unchanged at first.

With shards (shards.py) a matrix that reads the residual stream computes each shard's outputs from the shard's own
stream, and puts them side by side. So heads and feed-forward columns are in one tensor, as without shards. A matrix
that writes to the residual stream returns each shard's part of the sum separately.

Shape suffixes: N shards, B samples, T positions, D inputs, E outputs, R rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import LoraConfig
from swarm.model.functions import product
from swarm.model.masks import Dropout, DropoutKey
from swarm.model.nf4 import Nf4Matrix
from swarm.model.shards import Shards


class Adapter(nn.Module):
    """Two thin matrices, named A and B as in the paper."""

    def __init__(self, lora: LoraConfig, a_RD: nn.Parameter, num_outputs: int, site: str) -> None:
        """`a_RD` is the matrix A, which several adapters may have in common. `site` names the dropout before A, which
        those adapters have in common too."""
        super().__init__()
        self._scale, self._dropout = lora.scale, Dropout(lora.dropout, site)
        self.a = a_RD
        self.b = nn.Parameter(torch.empty(num_outputs, lora.rank, device=a_RD.device))

    def forward(self, hidden_BTD: Tensor, key: DropoutKey | None) -> Tensor:
        """Map hidden_BTD to output_BTE, or streams_NBTD to all shards' outputs side by side."""
        narrow_BTR = F.linear(self._dropout(hidden_BTD, key), self.a)
        return _side_by_side(narrow_BTR, self.b) * self._scale

    def apart(self, hidden_BTD: Tensor, key: DropoutKey | None, num_parts: int) -> Tensor:
        """Map hidden_BTD, the inputs of several shards side by side, to each shard's output [N, B, T, E]."""
        return F.linear(_apart(self._dropout(hidden_BTD, key), self.a, num_parts), self.b) * self._scale


class Projection(nn.Linear):
    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)
        self.adapter: Adapter | None = None

    def reset_parameters(self) -> None:
        """Draw nothing, which would take as long as all else: who makes a stage sets its weights anyway."""

    def freeze_in_4_bits(self, weight_ED: Tensor) -> None:
        """Let a matrix in NF4 take the place of the weight, which then is no parameter of the module."""
        del self.weight
        self.add_module("weight", Nf4Matrix(weight_ED))

    def adapt(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def forward(self, hidden_BTD: Tensor, key: DropoutKey | None = None) -> Tensor:
        """Map hidden_BTD to output_BTE, or streams_NBTD to all shards' outputs side by side. `key` names the
        microbatch, for the adapter's dropout."""
        output_BTE = _side_by_side(hidden_BTD, self.weight, self.bias)
        return output_BTE if self.adapter is None else output_BTE + self.adapter(hidden_BTD, key)


class WritingProjection(Projection):
    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool, shards: Shards | None) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)
        self._shards = shards

    def forward(self, hidden_BTD: Tensor, key: DropoutKey | None = None) -> Tensor:
        """Map hidden_BTD to output_BTE, or with shards to each shard's part of the sum [N, B, T, E].

        Each part has its share of the bias, so that the sum has the bias once.
        """
        if self._shards is None:
            return super().forward(hidden_BTD, key)
        output_NBTE = _apart(hidden_BTD, self.weight, self._shards.num_held)
        if self.bias is not None:
            output_NBTE = output_NBTE + self.bias / self._shards.num_shards
        if self.adapter is not None:
            output_NBTE = output_NBTE + self.adapter.apart(hidden_BTD, key, self._shards.num_held)
        return output_NBTE


def _side_by_side(hidden_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """The product with a matrix. For streams_NBTD: each stream's product with its share of the rows, side by side."""
    if hidden_BTD.ndim < 4:
        return product(hidden_BTD, weight_ED, bias_E)
    weights, num_parts = weight_ED.chunk(len(hidden_BTD)), len(hidden_BTD)
    biases = [None] * num_parts if bias_E is None else bias_E.chunk(num_parts)
    return torch.cat([product(*part) for part in zip(hidden_BTD, weights, biases, strict=True)], dim=-1)


def _apart(hidden_BTD: Tensor, weight_ED: Tensor, num_parts: int) -> Tensor:
    """The products of each share of the inputs with the matching share of a matrix's columns [N, B, T, E]."""
    parts = zip(hidden_BTD.chunk(num_parts, dim=-1), weight_ED.chunk(num_parts, dim=1), strict=True)
    return torch.stack([product(hidden_BTd, weight_Ed) for hidden_BTd, weight_Ed in parts])
