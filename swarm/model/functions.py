"""Operations and norms of a layer, in two kinds: for a CPU's caches, and in few launches for a GPU.

Those for a CPU use less memory bandwidth and keep fewer tensors for the backward than autograd would: what one or two
multiplications can compute again is not kept, which saves a quarter of a layer's activations. The results are those of
the formulas, up to rounding, and the same bits whether or not there will be a backward. There is no gradient of a
gradient.

A GPU has bandwidth, and takes longer to launch such an operation than to compute it. So modules that are made with
`fused` call torch's own operations, each of which is one launch. torch.compile gets these as well: it saves as much by
itself, and fuses them with the operations around them.

Shapes: B samples, T positions, D model width, E outputs, H heads, K head width, J half a head's width, or the whole
for tables of `whole_tables`, F feed-forward width.
"""

from typing import Any, assert_never, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swarm.config import ModelConfig
from swarm.model.nf4 import Nf4Matrix


def fuses(device: torch.device | str) -> bool:
    """Whether modules and optimizers on a device are made with `fused`, unless their maker says otherwise."""
    return torch.device(device).type == "cuda"


def rms_norm(hidden_BTD: Tensor, weight_D: Tensor, epsilon: float, *, fused: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467), in the wider of both types; the result has x's."""
    wide_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, weight_D.dtype))
    if fused or torch.compiler.is_compiling():
        return F.rms_norm(wide_BTD, weight_D.shape, weight_D, epsilon).to(hidden_BTD.dtype)
    return _apply(_RMSNorm, wide_BTD, weight_D, epsilon).to(hidden_BTD.dtype)


def rotate(heads_BHTK: Tensor, cos_TJ: Tensor, sin_TJ: Tensor) -> Tensor:
    """Turn each pair (element j, element j + K/2) by its position's angle: the pairing of Llama's checkpoints.

    The tables, as rotary_tables or `whole_tables` makes them, get no gradient. The rotation is computed in their type
    or the heads' type, whichever is wider, and the result has the heads' type.
    """
    if torch.compiler.is_compiling() and _are_whole(cos_TJ, heads_BHTK):
        return _turned(heads_BHTK, cos_TJ, sin_TJ)
    if torch.compiler.is_compiling():
        first_BHTJ, second_BHTJ = heads_BHTK.chunk(2, dim=-1)
        turned = first_BHTJ * cos_TJ - second_BHTJ * sin_TJ, second_BHTJ * cos_TJ + first_BHTJ * sin_TJ
        return torch.cat(turned, dim=-1).to(heads_BHTK.dtype)
    return _apply(_Rotation, heads_BHTK, cos_TJ, sin_TJ)


def whole_tables(cos_TJ: Tensor, sin_TJ: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for `rotate` that are as wide as a head. With them a rotation is four launches, and so is its backward."""
    return torch.cat((cos_TJ, cos_TJ), dim=-1), torch.cat((-sin_TJ, sin_TJ), dim=-1)


def swiglu(gate_BTF: Tensor, up_BTF: Tensor, *, fused: bool = False) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202)."""
    if fused or torch.compiler.is_compiling():
        return F.silu(gate_BTF) * up_BTF
    return _apply(_SwiGLU, gate_BTF, up_BTF)


def product(hidden_BTD: Tensor, weight_ED: Tensor | Nf4Matrix, bias_E: Tensor | None = None) -> Tensor:
    """torch's linear, for weights of any type, also in 4 bits.

    Weights of another type than that of the computation (with autocast, its type), and frozen ones, are converted for
    each product, forward and backward, and no converted copy is kept in between.
    """
    if isinstance(weight_ED, Nf4Matrix) or not weight_ED.requires_grad:
        return _apply(_ConvertedProduct, hidden_BTD, weight_ED, bias_E)
    is_cast = weight_ED.dtype is hidden_BTD.dtype or torch.is_autocast_enabled(hidden_BTD.device.type)
    return (
        F.linear(hidden_BTD, weight_ED, bias_E) if is_cast else _apply(_ConvertedProduct, hidden_BTD, weight_ED, bias_E)
    )


def rows(numbers: Tensor, table_VD: Tensor) -> Tensor:
    """The rows of a table, in float32 or wider. The gradients of rows that come often are added up in this type."""
    dtype = torch.promote_types(table_VD.dtype, torch.float32)
    if table_VD.requires_grad and table_VD.dtype is not dtype:
        return _apply(_Rows, numbers, table_VD)
    return F.embedding(numbers, table_VD).to(dtype)


def as_cast(weight: Tensor, cast_weight: Tensor) -> Tensor:
    """Return `cast_weight`, a copy of `weight` in another type, with the gradient that `weight.to(...)` would have.

    So all graphs share one copy, while with `weight.to(...)` each would keep its own.
    """
    return _apply(_AsCast, weight, cast_weight)


def _apply(function: type[torch.autograd.Function], *arguments: Tensor | Nf4Matrix | float | None) -> Tensor:
    """Run an operation, with autograd only if gradients are wanted.

    A layer has a dozen of these operations. For a single token of a text, autograd's part would take as long as the
    operations themselves.
    """
    if torch.is_grad_enabled():
        return cast(Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]  # torch does not annotate it
    return cast(Tensor, function.forward(_NothingKept(), *arguments))


class _NothingKept:
    """Stands in for autograd's context where there is no backward."""

    def save_for_backward(self, *_: Tensor) -> None:
        """Keep nothing."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        norm_BT1: Tensor = torch.linalg.vector_norm(hidden_BTD, dim=-1, keepdim=True)
        scale_BT1 = norm_BT1.square_().div_(hidden_BTD.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden_BTD, weight_D, scale_BT1)
        return (hidden_BTD * scale_BT1).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        normed_BTD = hidden_BTD * scale_BT1
        product_BTD = gradient_BTD * normed_BTD
        mean_BT1 = (product_BTD @ weight_D).div_(len(weight_D)).unsqueeze(-1)
        weight_gradient_D = product_BTD.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        hidden_gradient_BTD = torch.mul(gradient_BTD, weight_D, out=product_BTD)
        hidden_gradient_BTD.addcmul_(normed_BTD, mean_BT1, value=-1).mul_(scale_BT1)
        return hidden_gradient_BTD, weight_gradient_D, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_BHTK: Tensor, cos_TJ: Tensor, sin_TJ: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TJ, sin_TJ)
        return _turned(heads_BHTK, cos_TJ, sin_TJ)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHTK: Tensor) -> tuple[Tensor, None, None]:
        cos_TJ, sin_TJ = ctx.saved_tensors
        return _turned(gradient_BHTK, cos_TJ, sin_TJ, back=True), None, None


def _are_whole(table_TJ: Tensor, heads_BHTK: Tensor) -> bool:
    return table_TJ.shape[-1] == heads_BHTK.shape[-1]


def _turned(heads_BHTK: Tensor, cos_TJ: Tensor, sin_TJ: Tensor, *, back: bool = False) -> Tensor:
    if _are_whole(cos_TJ, heads_BHTK):
        swapped_BHTK = heads_BHTK.roll(heads_BHTK.shape[-1] // 2, dims=-1)
        turned_BHTK = torch.addcmul(heads_BHTK * cos_TJ, swapped_BHTK, sin_TJ, value=-1 if back else 1)
        return turned_BHTK.to(heads_BHTK.dtype)
    sin_TJ = -sin_TJ if back else sin_TJ
    turned_BHTK = torch.empty_like(heads_BHTK, dtype=torch.result_type(heads_BHTK, cos_TJ))
    first_BHTJ, second_BHTJ = heads_BHTK.chunk(2, dim=-1)
    to_first_BHTJ, to_second_BHTJ = turned_BHTK.chunk(2, dim=-1)
    torch.mul(first_BHTJ, cos_TJ, out=to_first_BHTJ).addcmul_(second_BHTJ, sin_TJ, value=-1)
    torch.mul(second_BHTJ, cos_TJ, out=to_second_BHTJ).addcmul_(first_BHTJ, sin_TJ)
    return turned_BHTK.to(heads_BHTK.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_BTF, up_BTF)
        return F.silu(gate_BTF).mul_(up_BTF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTF: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTF, up_BTF = ctx.saved_tensors
        gate_gradient_BTF = torch.ops.aten.silu_backward(gradient_BTF * up_BTF, gate_BTF)
        return gate_gradient_BTF, F.silu(gate_BTF).mul_(gradient_BTF)


class _AsCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast_weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast_weight.view_as(cast_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _ConvertedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, weight_ED: Tensor | Nf4Matrix, bias_E: Tensor | None) -> Tensor:
        # The weight is not saved with autograd, which would check it for changes: nothing writes to it.
        ctx.weight_ED, ctx.dtype = weight_ED, hidden_BTD.dtype
        device = hidden_BTD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTD.dtype
        bias_E = None if bias_E is None else bias_E.to(dtype)
        hidden_BTD = hidden_BTD.to(dtype)
        if weight_ED.requires_grad:
            ctx.save_for_backward(hidden_BTD)
        return F.linear(hidden_BTD, _in_type(weight_ED, dtype), bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        hidden_gradient_BTD = (gradient_BTE @ _in_type(ctx.weight_ED, gradient_BTE.dtype)).to(ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return hidden_gradient_BTD, None, None
        (hidden_BTD,), gradient_NE = ctx.saved_tensors, gradient_BTE.flatten(0, -2)
        weight_gradient_ED = (gradient_NE.T @ hidden_BTD.flatten(0, -2)).to(ctx.weight_ED.dtype)
        return hidden_gradient_BTD, weight_gradient_ED, gradient_NE.sum(0) if ctx.needs_input_grad[2] else None


def _in_type(weight_ED: Tensor | Nf4Matrix, dtype: torch.dtype) -> Tensor:
    return weight_ED.to(dtype) if isinstance(weight_ED, Tensor) else weight_ED.dense(dtype)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, table_VD: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.num_rows, ctx.dtype = len(table_VD), table_VD.dtype
        return F.embedding(numbers, table_VD).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (numbers,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(gradient, numbers, ctx.num_rows, -1, False).to(ctx.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float, *, fused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon, self.fused = epsilon, fused

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return rms_norm(hidden_BTD, self.weight, self.epsilon, fused=self.fused)


def make_norm(model: ModelConfig, width: int, *, fused: bool) -> RMSNorm | nn.LayerNorm:
    match model.norm:
        case "rms":
            return RMSNorm(width, model.norm_epsilon, fused=fused)
        case "layer":
            return nn.LayerNorm(width, model.norm_epsilon)
        case other:
            assert_never(other)
