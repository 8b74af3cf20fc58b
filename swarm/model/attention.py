"""Attention to the same and earlier positions, with rotary positions.

Rotary tables are made anew in every forward pass.

Shape suffixes: B samples, T positions, S positions of keys and values, D model width, H query heads, G key and value
heads, K head width, J half a head's width, R trained columns of the residual stream.
"""

import math
from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.functions import make_norm, rotate
from swarm.model.masks import DropoutKey
from swarm.model.projection import Projection, WritingProjection
from swarm.model.shards import Shards

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes attention from queries, keys and values."""


def rotary_tables(model: ModelConfig, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of positions, [T, J] float32 each (arXiv 2104.09864).

    If each sample has positions of its own ([B, T]), the tables are [B, 1, T, J], the same for all heads.

    The tables are not cached. They are cheap compared with a layer, and a cache would have to distinguish inference
    tensors from those that autograd may save.
    """
    if positions_T.ndim > 1:
        positions_T = positions_T[:, None]
    angles_TJ = positions_T[..., None].float() * rotary_frequencies(model, positions_T.device)
    return angles_TJ.cos(), angles_TJ.sin()


def rotary_frequencies(model: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position for each pair of a head's elements: [J], float32."""
    head_width = model.width_of_heads
    exponents_J = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    frequencies_J = 1.0 / model.rope_theta**exponents_J
    slowed_J = frequencies_J / model.rope_factor
    match model.rope_scaling:
        case "none":
            return frequencies_J
        case "linear":
            return slowed_J
        case "llama3":
            return _scaled_as_in_llama3(model, frequencies_J, slowed_J)
        case other:
            assert_never(other)


def _scaled_as_in_llama3(model: ModelConfig, frequencies_J: Tensor, slowed_J: Tensor) -> Tensor:
    """Scale as Llama 3.1's apply_scaling does.

    Waves are compared with the length of the sequences in the first training. Long waves are stretched, and short waves
    stay. In between, both are mixed, in proportion to how often a wave fits into such a sequence.
    """
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    wavelengths_J = 2 * math.pi / frequencies_J
    share_kept_J = (model.rope_original_positions / wavelengths_J - low) / (high - low)
    mixed_J = (1 - share_kept_J) * slowed_J + share_kept_J * frequencies_J
    mixed_J = torch.where(share_kept_J < 0, slowed_J, mixed_J)
    return torch.where(share_kept_J > 1, frequencies_J, mixed_J)


def attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask_B1TS: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention to the same and earlier positions. H / G query heads share a key and value head.

    There are keys and values of S positions, and queries of the last T of them.

    Args:
        mask_B1TS: bool, which positions attend to which; without it each attends to itself and all earlier ones.
    """
    group_size, device = q_BHTK.shape[1] // k_BGSK.shape[1], q_BHTK.device
    if group_size > 1 and q_BHTK.shape[2] == 1:
        # The heads of a group are queries of the head that they share: no kernel for groups is needed.
        grouped_BGHK = q_BHTK.reshape(*k_BGSK.shape[:2], group_size, -1)
        return F.scaled_dot_product_attention(grouped_BGHK, k_BGSK, v_BGSK, attn_mask=mask_B1TS).reshape_as(q_BHTK)
    # Flash attention takes no mask.
    may_be_flash = device.type == "cuda" and mask_B1TS is None
    capability = torch.cuda.get_device_capability(device) if may_be_flash else None
    if group_size > 1 and not has_grouped_kernel(device.type, capability, q_BHTK.dtype, q_BHTK.shape[-1]):
        k_BGSK, v_BGSK = (heads.repeat_interleave(group_size, dim=1) for heads in (k_BGSK, v_BGSK))
        group_size = 1
    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    is_causal = False
    # torch.compile has symbols for lengths that vary. A branch decides, where the comparison would be one more symbol.
    if mask_B1TS is None and num_queries == num_keys:
        is_causal = True
    if mask_B1TS is None and 1 < num_queries < num_keys:
        mask_B1TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_B1TS, is_causal=is_causal, enable_gqa=group_size > 1
    )


class Documents:
    """Rows of several documents, one after the other. Each document sees only itself, and its positions begin at 0."""

    def __init__(self, documents_BT: Tensor) -> None:
        """`documents_BT` is the document that each token belongs to; in a row the numbers never fall."""
        self._mask_B1TT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril().unsqueeze(1)
        places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        begins_BT = documents_BT.diff(dim=1, prepend=documents_BT[:, :1]) != 0
        self._positions_BT = places_T - (places_T * begins_BT).cummax(dim=1).values

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        """The positions of all tokens: [B, T]."""
        return self._positions_BT

    def attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        """Attention of each token to itself and the earlier tokens of its document."""
        return attention(q_BHTK, k_BHTK, v_BHTK, self._mask_B1TT)


def has_grouped_kernel(
    device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_width: int
) -> bool:
    """Whether torch has a fused kernel for grouped queries.

    On GPUs only flash attention has one: for numbers of 16 bits and heads up to 256 wide, on an A100 and later. Without
    it torch falls back to plain products for grouped queries, whose T x T weights are written out and kept for the
    backward. With equal numbers of query and key heads, torch's memory-efficient kernel covers all other cases.

    Args:
        capability: of a CUDA device, as torch.cuda.get_device_capability gives it.
    """
    if device_type == "cpu":
        return True
    return (
        capability is not None
        and capability >= (8, 0)
        and dtype in (torch.float16, torch.bfloat16)
        and head_width <= 256
    )


class CausalSelfAttention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) to the same and earlier positions."""

    def __init__(
        self, model: ModelConfig, output_width: int, shards: Shards | None = None, *, fused: bool = False
    ) -> None:
        """`shards` are the shards that the heads of `model` are divided among."""
        super().__init__()
        head_width = model.width_of_heads
        self.head_width = head_width
        self.q = Projection(model.d_model, model.num_heads * head_width, bias=model.qkv_bias)
        self.k = Projection(model.d_model, model.kv_heads * head_width, bias=model.qkv_bias)
        self.v = Projection(model.d_model, model.kv_heads * head_width, bias=model.qkv_bias)
        self.q_norm = make_norm(model, head_width, fused=fused) if model.qk_norm else nn.Identity()
        self.k_norm = make_norm(model, head_width, fused=fused) if model.qk_norm else nn.Identity()
        self.output = WritingProjection(
            model.num_heads * head_width, output_width, bias=model.attention_output_bias, shards=shards
        )

    def forward(
        self, hidden_BTD: Tensor, cos_TJ: Tensor | None, sin_TJ: Tensor | None, attend: Attend = attention,
        key: DropoutKey | None = None,
    ) -> Tensor:  # fmt: skip
        """`attend` computes attention from queries, keys and values; with a cache, earlier positions take part. `key`
        names the microbatch, for the dropout of adapters."""
        q_BHTK = self.q_norm(rearrange(self.q(hidden_BTD, key), "b t (h k) -> b h t k", k=self.head_width))
        k_BGTK = self.k_norm(rearrange(self.k(hidden_BTD, key), "b t (g k) -> b g t k", k=self.head_width))
        v_BGTK = rearrange(self.v(hidden_BTD, key), "b t (g k) -> b g t k", k=self.head_width)
        if cos_TJ is not None and sin_TJ is not None:
            q_BHTK, k_BGTK = rotate(q_BHTK, cos_TJ, sin_TJ), rotate(k_BGTK, cos_TJ, sin_TJ)
        mixed_BHTK = attend(q_BHTK, k_BGTK, v_BGTK)
        output_BTR: Tensor = self.output(rearrange(mixed_BHTK, "b h t k -> b t (h k)"), key)
        return output_BTR
