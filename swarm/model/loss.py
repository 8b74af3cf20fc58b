"""The loss of a language model: cross entropy of every next token, without the logits of all positions at once.

Losses are sums over targets; a caller that wants a mean divides by the number of targets.

With a vocabulary of 128,000 the logits of 4,096 positions take 2 GiB in float32, and autograd would keep three such
tensors, many times as much as a layer keeps. So logits are made for one chunk of positions at a time. They are turned
in place into their gradient, from which the gradients of the hidden state and of the head's weight are computed at
once. The backward only scales these gradients, as in Liger Kernel (arXiv 2410.10989). Chunks depend on shapes alone, so
a loss that is computed again has the same bits. On a GPU chunks are few and large, and torch's own cross entropy makes
their gradients, because each operation on a small chunk takes longer to launch than to compute.

Shapes: B samples, T positions, N = B * T, D model width, V vocabulary, C positions of a chunk.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm.config import ModelConfig
from swarm.training.samples import NO_TARGET

_LEAST_CHUNK = 1 << 22
"""A chunk has room for at least this many logits, since very many small chunks would take longer."""
_CHUNK_PER_HIDDEN = 3
"""A chunk has room for this many logits for each number of the hidden state. This is little, because a layer keeps 16
numbers or more for each of them."""
_CHUNK_MULTIPLE = 16
"""The positions of a chunk are a multiple of this number, which suits matrix units."""
_FUSED_CHUNK = 1 << 26
"""A chunk on a GPU has room for this many logits, which take 14 bytes each."""
_VOCABULARY_BLOCK = 16_384
"""The number of tokens whose rows of the weight are converted and multiplied at a time."""


def summed_loss(
    hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, *, fused: bool = False,
    gradient_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy in nats, summed over all targets: a scalar, float32 or wider.

    Matrix products are computed in autocast's type, or without autocast in the hidden state's type. Everything else is
    computed in float32 or wider, including the sum of the weight's gradient over positions. The forward already
    computes the gradients, so the backward can run only once.

    Args:
        targets_BT: int64, each below V, or NO_TARGET.
        gradient_scale: a scalar on the same device; all gradients become those of the loss times this. The factor is
            there before a gradient is rounded to the products' type.
    """
    device = hidden_BTD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTD.dtype
    arguments = (hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), dtype, torch.is_grad_enabled(), fused)
    return cast(Tensor, _SummedLoss.apply(*arguments, gradient_scale))  # type: ignore[no-untyped-call]  # torch does not annotate it


def summed_loss_of_logits(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=NO_TARGET, reduction="sum")


def chunk_length(num_positions: int, d_model: int, vocab_size: int, *, fused: bool = False) -> int:
    """The number of positions in a chunk, whose logits are in memory at the same time."""
    num_logits = _FUSED_CHUNK if fused else max(_LEAST_CHUNK, _CHUNK_PER_HIDDEN * num_positions * d_model)
    length = num_logits // vocab_size
    return min(num_positions, max(1, length // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)


def loss_bytes(model: ModelConfig, num_positions: int, *, fused: bool = False) -> int:
    """The most bytes that the loss of a microbatch takes, besides autograd's graph and the weights' gradients."""
    if model.custom_class:
        # The logits, their log-probabilities, and the gradient of one of the two.
        return 4 * 3 * num_positions * model.vocab_size
    length = chunk_length(num_positions, model.d_model, model.vocab_size, fused=fused)
    if fused:
        # The logits in the products' type, and in float32 the logits, their log-probabilities and a gradient.
        return 14 * length * model.vocab_size + 4 * 2 * num_positions * model.d_model
    # Besides a chunk's logits there are the output of the final norm and its gradient.
    return 4 * (length * model.vocab_size + 2 * num_positions * model.d_model)


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, dtype: torch.dtype, differentiates: bool,
        fused: bool, gradient_scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(dtype, torch.float32)
        wants_hidden, wants_weight = (differentiates and wanted for wanted in ctx.needs_input_grad[:2])
        hidden_gradient_ND = torch.empty_like(hidden_ND, dtype=wide) if wants_hidden else None
        weight_gradient_VD = torch.empty_like(weight_VD, dtype=wide) if wants_weight else None
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype, dtype
        if fused:
            gradients = hidden_gradient_ND, weight_gradient_VD
            ctx.save_for_backward(*gradients)
            return _in_large_chunks(hidden_ND, weight_VD, targets_N, dtype, gradient_scale, *gradients)
        losses_N = torch.empty_like(targets_N, dtype=wide)
        blocks = [slice(start, start + _VOCABULARY_BLOCK) for start in range(0, len(weight_VD), _VOCABULARY_BLOCK)]
        num_positions, d_model = hidden_ND.shape
        length = chunk_length(num_positions, d_model, len(weight_VD))
        logits_CV = hidden_ND.new_empty((length, len(weight_VD)), dtype=wide)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for first in range(0, num_positions, length):
                chunk = slice(first, first + length)
                hidden_CD = hidden_ND[chunk].to(dtype)
                logits_CV = logits_CV[: len(hidden_CD)]
                for block in blocks:
                    _multiply(hidden_CD, weight_VD[block].to(dtype).T, logits_CV[:, block], adds=False)
                losses_N[chunk] = _to_gradient(logits_CV, targets_N[chunk], gradient_scale)
                for number, block in enumerate(blocks):
                    gradient_CW = logits_CV[:, block].to(dtype)
                    if hidden_gradient_ND is not None:
                        _multiply(gradient_CW, weight_VD[block].to(dtype), hidden_gradient_ND[chunk], adds=number > 0)
                    if weight_gradient_VD is not None:
                        _multiply(gradient_CW.T, hidden_CD, weight_gradient_VD[block], adds=first > 0)
        ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD)
        return losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_dtype, weight_dtype, dtype = ctx.dtypes
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        if hidden_gradient_ND is not None:
            hidden_gradient_ND = hidden_gradient_ND.mul_(scale).to(hidden_dtype)
        if weight_gradient_VD is not None:
            # torch.autocast rounds the gradient like this, whether or not the weight was cast beforehand.
            weight_gradient_VD = weight_gradient_VD.mul_(scale).to(dtype).to(weight_dtype)
        return hidden_gradient_ND, weight_gradient_VD, None, None, None, None, None


def _in_large_chunks(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, dtype: torch.dtype, gradient_scale: Tensor | None,
    hidden_gradient_ND: Tensor | None, weight_gradient_VD: Tensor | None,
) -> Tensor:  # fmt: skip
    """The summed loss. Writes the gradients, where there is a tensor for them."""
    num_positions, d_model = hidden_ND.shape
    length = chunk_length(num_positions, d_model, len(weight_VD), fused=True)
    wide, losses, cast_VD = torch.promote_types(dtype, torch.float32), [], weight_VD.to(dtype)
    differentiates = hidden_gradient_ND is not None or weight_gradient_VD is not None
    for first in range(0, len(hidden_ND), length):
        chunk = slice(first, first + length)
        hidden_CD = hidden_ND[chunk].to(dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False), torch.set_grad_enabled(differentiates):
            logits_CV = F.linear(hidden_CD, cast_VD).detach().requires_grad_(differentiates)
            loss = F.cross_entropy(logits_CV.to(wide), targets_N[chunk], ignore_index=NO_TARGET, reduction="sum")
            scaled = loss if gradient_scale is None else loss * gradient_scale
        losses.append(loss.detach())
        if not differentiates:
            continue
        (gradient_CV,) = torch.autograd.grad(scaled, logits_CV)
        if hidden_gradient_ND is not None:
            hidden_gradient_ND[chunk] = gradient_CV @ cast_VD
        if weight_gradient_VD is not None:
            _multiply(gradient_CV.T, hidden_CD, weight_gradient_VD, adds=first > 0)
    return torch.stack(losses).sum()


def _multiply(left: Tensor, right: Tensor, product: Tensor, *, adds: bool) -> None:
    """Write left @ right to `product`, or add it there. If all types are the same, no second copy is made."""
    if product.dtype == left.dtype:
        product.addmm_(left, right, beta=int(adds))
    elif adds:
        product.add_(left @ right)
    else:
        product.copy_(left @ right)


def _to_gradient(logits_CV: Tensor, targets_C: Tensor, scale: Tensor | None) -> Tensor:
    """Replace logits by the gradient of `scale` times the sum of their losses, and return these losses."""
    has_target_C1 = (targets_C != NO_TARGET).unsqueeze(1)
    targets_C1 = targets_C.clamp(min=0).unsqueeze(1)
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    target_logits_C1 = logits_CV.gather(1, targets_C1) - largest_C1
    sums_C1 = logits_CV.sub_(largest_C1).exp_().sum(dim=1, keepdim=True)
    losses_C1 = (sums_C1.log() - target_logits_C1).where(has_target_C1, 0.0)
    ones_C1 = has_target_C1.to(logits_CV.dtype)
    ones_C1 = ones_C1 if scale is None else ones_C1 * scale
    logits_CV.mul_(ones_C1 / sums_C1).scatter_add_(1, targets_C1, -ones_C1)
    return losses_C1.squeeze(1)
