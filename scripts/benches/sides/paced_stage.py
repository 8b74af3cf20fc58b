"""Stages for benches: they take a fixed time for a sample without using the CPU, as if a GPU computed, or do no work.

Peers load them by name in `model.custom_class`. Shape suffixes: B samples, T positions, D model width, F feed-forward
width.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from swarm.config import RunConfig
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule

SECONDS_PER_SAMPLE = 0.033
"""The time for forward and backward together, unless PACE says otherwise. Backward takes twice as long as forward."""
PACE = "SWARM_BENCH_SECONDS_PER_SAMPLE"  # The environment variable that changes the time


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, num_samples: int) -> Tensor:
        ctx.seconds = num_samples * float(os.environ.get(PACE, SECONDS_PER_SAMPLE)) / 3
        time.sleep(ctx.seconds)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Paced(nn.Module):
    """Multiplies its input by the means of its layers. Stage 0 embeds tokens first, and the last stage returns
    logits."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        model = config.model
        is_last = stage == config.stages.num_stages - 1
        self.embedding = nn.Embedding(model.vocab_size, model.d_model) if stage == 0 else None
        self.layers = nn.ParameterDict(
            {str(layer): torch.empty(model.feed_forward_width, model.d_model) for layer in layer_range}
        )
        self.head = nn.Linear(model.d_model, model.vocab_size, bias=False) if is_last else None

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        """tokens_BT at stage 0, else hidden_BTD; gives hidden_BTD, or logits_BTV at the last stage."""
        hidden_BTD = inputs if self.embedding is None else self.embedding(inputs)
        for layer_FD in self.layers.values():
            hidden_BTD = hidden_BTD * (1.0 + layer_FD.mean())
        hidden_BTD = _pause(hidden_BTD, len(inputs))
        output_BTD: Tensor = hidden_BTD if self.head is None else self.head(hidden_BTD)
        return output_BTD


class PacedTransformer(StageModule):
    """A stage of the transformer with the usual parameters and results, which come after a pause."""

    def forward(self, inputs: Tensor, **options: Any) -> Tensor:
        return _pause(super().forward(inputs, **options), len(inputs))


def _pause(outputs: Tensor, num_samples: int) -> Tensor:
    paused: Tensor = _Pause.apply(outputs, num_samples)  # type: ignore[no-untyped-call]  # torch's
    return paused


VOCABULARY = 2


class Identity(nn.Module):
    """Returns its input. The last stage returns the first two channels, as logits of a vocabulary of two."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        self.is_last = stage == config.stages.num_stages - 1
        # An optimizer needs at least one parameter.
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        return inputs[..., :VOCABULARY] if self.is_last else inputs
