"""Shards of layers: groups of heads and of feed-forward columns, and the sums by which they exchange results.

Each shard n has a residual stream x_n of its own, which it reads and adds to. All begin with the same stream x, compute
a stretch of sublayers side by side, and meet again: x + sum over n of (x_n - x). A block's type (`model.block_types`)
says how long stretches are:

- tp: a sublayer, the attention or the feed-forward block (Megatron-LM, arXiv 1909.08053);
- spd: a layer, whose feed-forward block reads what the shard's own heads have added (SPD, arXiv 2502.20727);
- parallel: as many layers of this type as follow each other within a stage (compare Parallel Track, arXiv 2602.07306).

A stretch takes two sums over the shards: in the forward the sum of their additions, and in the backward the sum of
their gradients for the stream with which they began. Nothing else is exchanged, and all sums go through
`Shards.reduce`. The shards may all be in this process, or be spread over several, each of which holds its parts of the
matrices.

Shape suffixes: N shards held by this process, B samples, T positions, D model width.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, assert_never, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm.config import ModelConfig

Sublayer = Literal["attention", "feed_forward"]
SUBLAYERS: tuple[Sublayer, ...] = ("attention", "feed_forward")
Stretch = list[tuple[int, tuple[Sublayer, ...]]]
"""The layers between two meetings of the shards, each with the sublayers of it that are computed there."""

READS = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
WRITES = ("attention.output", "feed_forward.down")
_CUT_AXES = {
    **{f".{name}.{parameter}": 0 for name in READS for parameter in ("weight", "bias", "adapter.b")},
    **{f".{name}.{parameter}": 1 for name in WRITES for parameter in ("weight", "adapter.a")},
}
"""By the end of a parameter's name: the axis along which the parameter is divided among shards. Matrices that read the
stream are cut by outputs, and those that write to it by inputs."""


def sum_here(parts_N: Tensor) -> Tensor:
    return parts_N.sum(dim=0)


def sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """The sum over shards that are spread over the processes of a group; it blocks until all processes take part."""

    def reduce(parts_N: Tensor) -> Tensor:
        total = parts_N.sum(dim=0)
        dist.all_reduce(total, group=group)
        return total

    return reduce


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The shards of a model, and how those of this process reach the others.

    Attributes:
        num_shards: how many shards there are in all processes together.
        num_held: how many of them this process holds.
        reduce: maps the terms of this process's shards, [N, ...], to the sum over all shards, [...]. With several
            processes all of them call it in the same order.
    """

    num_shards: int
    num_held: int
    reduce: Callable[[Tensor], Tensor] = sum_here

    def held(self, model: ModelConfig) -> ModelConfig:
        """The model's sizes with only the heads and feed-forward columns that this process holds."""
        return dataclasses.replace(
            model,
            num_heads=model.num_heads * self.num_held // self.num_shards,
            num_kv_heads=model.kv_heads * self.num_held // self.num_shards,
            head_width=model.width_of_heads,
            d_ff=model.feed_forward_width * self.num_held // self.num_shards,
            block_types="",
            num_shards=1,
        )

    def begin(self, hidden_BTD: Tensor) -> Tensor:
        """Give every shard the same stream [N, B, T, D]. Its gradient is the sum of all shards' gradients."""
        return cast(Tensor, _Begin.apply(hidden_BTD, self))  # type: ignore[no-untyped-call]  # torch does not annotate it

    def meet(self, added_NBTD: Tensor) -> Tensor:
        """Sum all shards' additions [B, T, D]. Each shard gets the sum's gradient."""
        return cast(Tensor, _Meet.apply(added_NBTD, self))  # type: ignore[no-untyped-call]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return hidden_BTD.expand(shards.num_held, *hidden_BTD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NBTD: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.reduce(gradient_NBTD), None


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, added_NBTD: Tensor, shards: Shards) -> Tensor:
        ctx.num_held = shards.num_held
        return shards.reduce(added_NBTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return gradient_BTD.expand(ctx.num_held, *gradient_BTD.shape), None


def stretches(model: ModelConfig, layers: range) -> list[Stretch]:
    """The stretches of one stage: pieces that shards compute side by side without exchanging anything."""
    found: list[Stretch] = []
    for layer in layers:
        kind = model.types_of_blocks[layer]
        match kind:
            case "tp":
                found += [[(layer, (sublayer,))] for sublayer in SUBLAYERS]
            case "spd":
                found.append([(layer, SUBLAYERS)])
            case "parallel":
                if layer > layers.start and model.types_of_blocks[layer - 1] == kind:
                    found[-1].append((layer, SUBLAYERS))
                else:
                    found.append([(layer, SUBLAYERS)])
            case other:
                assert_never(other)
    return found


def cut_axis(name: str) -> int | None:
    """The axis along which a parameter is divided among shards; None if each process has all of it.

    For parameters of layers that are not cut (norms, and biases of matrices that write to the stream), each process
    computes a part of the gradient, and the sum of these parts is the gradient.
    """
    return next((axis for end, axis in _CUT_AXES.items() if name.endswith(end)), None)


def part_of(name: str, whole: Tensor, process: int, num_processes: int) -> Tensor:
    """The part of a parameter that one process holds, as a view. All processes hold equally many shards."""
    axis = cut_axis(name)
    return whole if axis is None else whole.chunk(num_processes, dim=axis)[process]


def whole_of(name: str, parts: list[Tensor]) -> Tensor:
    """A parameter of the whole model, put together from the parts of all processes in their order."""
    axis = cut_axis(name)
    return parts[0] if axis is None else torch.cat(parts, dim=axis)
