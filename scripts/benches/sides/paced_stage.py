"""Stages that take a fixed time for a sample, without using the CPU: as if a GPU computed.

Peers load them by name in `model.custom_class`. So many peers fit on few cores, and each has a capacity of its own,
which an environment variable may change. `Paced` is for measuring links: each of its layers has (d_ff, d_model)
parameters, which cost next to no computation and do not learn much. `Narrow` has hardly any parameters.
`PacedTransformer` is the real stage, with pauses.

Shape suffixes: B samples, T positions, D model width, F feed-forward width.
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
PACE = "SWARM_BENCH_SECONDS_PER_SAMPLE"
"""The environment variable that changes the time."""


class _Pause(torch.autograd.Function):
    """Passes its input on, after a pause."""

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
        """See StageModule."""
        return _pause(super().forward(inputs, **options), len(inputs))


def _pause(outputs: Tensor, num_samples: int) -> Tensor:
    """Return `outputs` unchanged, after the pause for this many samples."""
    paused: Tensor = _Pause.apply(outputs, num_samples)  # type: ignore[no-untyped-call]  # torch's
    return paused


class Narrow(nn.Module):
    """A stage whose activations are as wide as the bench needs, with hardly any computing: only a few channels differ.

    It is for measuring long lines, because with a real stage the CPU would be the limit.
    """

    WIDTH = 32

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        model = config.model
        is_last = stage == config.stages.num_stages - 1
        self.num_repeats = model.d_model // self.WIDTH
        self.embedding = nn.Embedding(model.vocab_size, self.WIDTH) if stage == 0 else None
        self.layers = nn.ParameterDict({str(layer): torch.empty(self.WIDTH) for layer in layer_range})
        self.head = nn.Linear(self.WIDTH, model.vocab_size, bias=False) if is_last else None

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        """tokens_BT at stage 0, else hidden_BTD; gives hidden_BTD, or logits_BTV at the last stage."""
        if self.embedding is None:
            narrow_BTF = inputs.reshape(*inputs.shape[:-1], self.num_repeats, self.WIDTH).mean(dim=-2)
        else:
            narrow_BTF = self.embedding(inputs)
        for layer_F in self.layers.values():
            narrow_BTF = narrow_BTF * layer_F
        narrow_BTF = _pause(narrow_BTF, len(inputs))
        output_BTD: Tensor = narrow_BTF.repeat(1, 1, self.num_repeats) if self.head is None else self.head(narrow_BTF)
        return output_BTD
