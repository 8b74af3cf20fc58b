"""Training in one process that rounds where a swarm's stages do. Tests compare runs with a smaller `wire.dtype` with
it.

The rounding is implemented here a second time, after docs/protocol.md, and shares no code with the library.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from swarm.config import RunConfig
from swarm.model.masks import DropoutKey
from swarm.model.stages import build_stage
from tests.support.chain import tokens


def rounded(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A float32 tensor, rounded as it would arrive after the wire."""
    if dtype == "fp16":
        # The tensor is scaled so that its largest magnitude, m * 2^e with 1/2 <= m < 1, becomes m * 2^15.
        scale = 2.0 ** (15 - max(math.frexp(float(tensor.abs().max()))[1], -111))
        return (tensor * scale).half().float() / scale
    if dtype != "int8":
        return tensor.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).float()
    flat = tensor.flatten()
    blocks = torch.zeros(-(-len(flat) // 128), 128)
    blocks.view(-1)[: len(flat)] = flat
    scales = (blocks.abs().amax(dim=1, keepdim=True) / 127).bfloat16().float()
    codes = torch.where(scales == 0, 0, (blocks * (1 / scales)).round().clamp(-127, 127))
    return (codes * scales).view(-1)[: len(flat)].view(tensor.shape)


class _Boundary(torch.autograd.Function):
    """Rounds the hidden state on its way down, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, dtype: str) -> torch.Tensor:
        ctx.dtype = dtype
        return rounded(hidden, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rounded(gradient, ctx.dtype), None


class RoundingModel(torch.nn.Module):
    """The whole model as one graph, with the roundings between its stages."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.stages = [build_stage(config, stage, device="cpu") for stage in range(config.stages.num_stages)]

    def loss(self, tokens_BT1: torch.Tensor, key: DropoutKey | None) -> torch.Tensor:
        """The mean loss in nats per token."""
        tokens_BT = tokens_BT1[:, :-1].long()
        hidden = tokens_BT
        for number, stage in enumerate(self.stages):
            if number > 0:
                hidden = _Boundary.apply(hidden, self.config.wire.dtype)  # type: ignore[no-untyped-call]
            context = {"tokens_BT": tokens_BT} if self.config.model.bottleneck_dim else {}
            hidden = stage(hidden, dropout_key=key, **context)
        targets_BT = tokens_BT1[:, 1:].long()
        return torch.nn.functional.cross_entropy(hidden.flatten(0, 1), targets_BT.flatten())

    def gradients(self) -> dict[str, torch.Tensor]:
        parameters = [pair for stage in self.stages for pair in stage.named_parameters()]
        return {name: p.grad for name, p in parameters if p.grad is not None}


def rounding_reference(config: RunConfig, microbatches: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the gradient summed over all targets, with the initial weights."""
    model, losses = RoundingModel(config), []
    for microbatch in microbatches:
        loss = model.loss(tokens(config, microbatch), DropoutKey(seed=config.data.seed, microbatch=microbatch))
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
    return losses, {name: value * config.data.tokens_per_microbatch for name, value in model.gradients().items()}
