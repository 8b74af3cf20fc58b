"""The parts of a decoder-only transformer, and dropout that can be computed again.

Used by stages.py. Modules hold no state but parameters: rotary tables and dropout masks are made anew in every forward
pass, so the same inputs and the same key give the same outputs whenever, and however often, they are computed. The
global random state and `training` make no difference.

Shape suffixes: B samples, T positions, D model width, H query heads, G key and value heads, K head width,
J half a head's width, F feed-forward width, V vocabulary, R trained columns of the residual stream (D, or
model.bottleneck_dim), C its other columns.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.functions import rms_norm, rotate, swiglu
from swarm.model.masks import key_digest, random_mask

FIXED_STD = 0.2
"""Standard deviation of the columns that a bottleneck leaves out. It was the best of 0.02, 0.2 and 1 for a small model.
These columns cannot grow, so they begin larger than what is trained."""


@dataclass(frozen=True, kw_only=True)
class DropoutKey:
    """Names the dropout of one microbatch. Together with the place in the model it determines every mask.

    Attributes:
        seed: the run's seed.
        microbatch: the microbatch's id.
    """

    seed: int
    microbatch: int


def seeded_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator whose numbers follow from `key` alone, in every process and Python version."""
    return torch.Generator(device).manual_seed(int.from_bytes(key_digest(*key)[:8], "big"))


def dropout(hidden_BTD: Tensor, probability: float, key: DropoutKey | None, site: str) -> Tensor:
    """Zero each element with `probability` and scale the rest to keep the mean; without a key, do nothing.

    The mask follows from the key, the site's name and an element's place, on whatever device.
    """
    if key is None or probability == 0.0:
        return hidden_BTD
    dropped_BTD = random_mask(hidden_BTD.shape, probability, hidden_BTD.device, key.seed, key.microbatch, site)
    return hidden_BTD.masked_fill(dropped_BTD, 0.0) * (1.0 / (1.0 - probability))


class RMSNorm(nn.Module):
    """functions.rms_norm with its trained weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return rms_norm(hidden_BTD, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """To mean 0 and variance 1, then times a trained weight, plus a trained bias (arXiv 1607.06450)."""

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


def rotary_tables(
    model: ModelConfig, num_positions: int, device: torch.device, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of positions from `first` on, [T, J] float32 each (arXiv 2104.09864).

    They are not cached: they are cheap beside a layer, and a cache would have to tell inference tensors from those that
    autograd may save.
    """
    positions_T1 = torch.arange(first, first + num_positions, device=device, dtype=torch.float32)[:, None]
    angles_TJ = positions_T1 * rotary_frequencies(model, device)
    return angles_TJ.cos(), angles_TJ.sin()


def rotary_frequencies(model: ModelConfig, device: torch.device) -> Tensor:
    """Radians a position for each pair of a head's elements: [J], float32.

    With `rope_scaling = "llama3"` a wave that is longer than the first training's sequences is stretched, a short one
    is left, and in between the two are mixed in proportion to how often it fits (Llama 3.1's apply_scaling).
    """
    head_width = model.width_of_heads
    exponents_J = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    frequencies_J = 1.0 / model.rope_theta**exponents_J
    if model.rope_scaling == "none":
        return frequencies_J
    slowed_J = frequencies_J / model.rope_factor
    if model.rope_scaling == "linear":
        return slowed_J
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    wavelengths_J = 2 * math.pi / frequencies_J
    share_kept_J = (model.rope_original_positions / wavelengths_J - low) / (high - low)
    mixed_J = (1 - share_kept_J) * slowed_J + share_kept_J * frequencies_J
    mixed_J = torch.where(share_kept_J < 0, slowed_J, mixed_J)
    return torch.where(share_kept_J > 1, frequencies_J, mixed_J)


def attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
    """Scaled dot-product attention to the same and earlier positions. H / G query heads share a key and value head.

    There are keys and values of S positions, and queries of the last T of them.
    """
    group_size, device = q_BHTK.shape[1] // k_BGSK.shape[1], q_BHTK.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if group_size > 1 and not has_grouped_kernel(device.type, capability, q_BHTK.dtype, q_BHTK.shape[-1]):
        k_BGSK, v_BGSK = (heads.repeat_interleave(group_size, dim=1) for heads in (k_BGSK, v_BGSK))
        group_size = 1
    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    mask_TS = None
    if 1 < num_queries < num_keys:
        mask_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_TS, is_causal=num_queries == num_keys, enable_gqa=group_size > 1
    )


class KeyValueCache:
    """Keys and values of the positions that have been computed, of some sequences side by side.

    Attributes:
        num_positions: that every layer has.
    """

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: the most positions that it is to hold. Memory for them is taken once a layer brings its first.
        """
        self.capacity = capacity
        self.num_positions = 0
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that is taken."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def extend(self, layer: str, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values of the next T positions; gives those of all positions so far."""
        if layer not in self._layers:
            shape = (*k_BGTK.shape[:2], self.capacity, k_BGTK.shape[3])
            self._layers[layer] = (k_BGTK.new_empty(shape), v_BGTK.new_empty(shape))
        end = self.num_positions + k_BGTK.shape[2]
        assert end <= self.capacity, "the cache is full"
        k_BGSK, v_BGSK = self._layers[layer]
        k_BGSK[:, :, self.num_positions : end] = k_BGTK
        v_BGSK[:, :, self.num_positions : end] = v_BGTK
        return k_BGSK[:, :, :end], v_BGSK[:, :, :end]


def has_grouped_kernel(
    device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_width: int
) -> bool:
    """Whether torch has a fused kernel for grouped queries.

    On GPUs only flash attention does that: for numbers of 16 bits and heads up to 256 wide, on an A100 and later.
    Without it torch falls back to plain products for grouped queries, whose T x T weights are written out and kept for
    the backward. If there are as many keys as queries, its memory-efficient kernel takes all the other cases.

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

    def __init__(self, model: ModelConfig, output_width: int) -> None:
        super().__init__()
        head_width = model.width_of_heads
        self.num_heads = model.num_heads
        self.num_kv_heads = model.kv_heads
        self.q = nn.Linear(model.d_model, model.num_heads * head_width, bias=model.qkv_bias)
        self.k = nn.Linear(model.d_model, model.kv_heads * head_width, bias=model.qkv_bias)
        self.v = nn.Linear(model.d_model, model.kv_heads * head_width, bias=model.qkv_bias)
        self.q_norm = make_norm(model, head_width) if model.qk_norm else nn.Identity()
        self.k_norm = make_norm(model, head_width) if model.qk_norm else nn.Identity()
        self.output = nn.Linear(model.num_heads * head_width, output_width, bias=model.attention_output_bias)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_TJ: Tensor | None,
        sin_TJ: Tensor | None,
        extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """
        Args:
            extend: puts earlier positions before keys and values.
        """
        q_BHTK = self.q_norm(rearrange(self.q(hidden_BTD), "b t (h k) -> b h t k", h=self.num_heads))
        k_BGTK = self.k_norm(rearrange(self.k(hidden_BTD), "b t (g k) -> b g t k", g=self.num_kv_heads))
        v_BGTK = rearrange(self.v(hidden_BTD), "b t (g k) -> b g t k", g=self.num_kv_heads)
        if cos_TJ is not None and sin_TJ is not None:
            q_BHTK, k_BGTK = rotate(q_BHTK, cos_TJ, sin_TJ), rotate(k_BGTK, cos_TJ, sin_TJ)
        k_BGSK, v_BGSK = (k_BGTK, v_BGTK) if extend is None else extend(k_BGTK, v_BGTK)
        mixed_BHTK = attention(q_BHTK, k_BGSK, v_BGSK)
        output_BTR: Tensor = self.output(rearrange(mixed_BHTK, "b h t k -> b t (h k)"))
        return output_BTR


class SwiGLU(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, model: ModelConfig, output_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model.d_model, model.feed_forward_width, bias=model.feed_forward_bias)
        self.up = nn.Linear(model.d_model, model.feed_forward_width, bias=model.feed_forward_bias)
        self.down = nn.Linear(model.feed_forward_width, output_width, bias=model.feed_forward_bias)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        output_BTR: Tensor = self.down(swiglu(self.gate(hidden_BTD), self.up(hidden_BTD)))
        return output_BTR


class GELU(nn.Module):
    """Plain feed-forward: down(gelu(up(x))), GELU as its tanh approximation has it (arXiv 1606.08415, section 2)."""

    def __init__(self, model: ModelConfig, output_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(model.d_model, model.feed_forward_width, bias=model.feed_forward_bias)
        self.down = nn.Linear(model.feed_forward_width, output_width, bias=model.feed_forward_bias)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        output_BTR: Tensor = self.down(F.gelu(self.up(hidden_BTD), approximate="tanh"))
        return output_BTR


class TransformerLayer(nn.Module):
    """One pre-norm layer. Its index in the whole model, `layer`, names its dropout.

    With a bottleneck a layer reads all columns of the residual stream and writes the trained ones. The model's last
    layer writes all of them, because nothing travels after it.
    """

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.writes_all = layer == model.num_layers - 1
        width = model.d_model if self.writes_all else model.hidden_width
        self.site = f"layers.{layer}"
        self.probability = model.dropout
        self.attention_norm = make_norm(model, model.d_model)
        self.attention = CausalSelfAttention(model, width)
        self.feed_forward_norm = make_norm(model, model.d_model)
        self.feed_forward = (SwiGLU if model.feed_forward == "swiglu" else GELU)(model, width)

    def forward(
        self,
        hidden_BTR: Tensor,
        fixed_BTC: Tensor | None,
        cos_TJ: Tensor | None,
        sin_TJ: Tensor | None,
        key: DropoutKey | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """
        Args:
            fixed_BTC: the columns that are not trained, where there is a bottleneck.
            cos_TJ, sin_TJ: as rotary_tables makes them, where positions are rotary.
            cache: of the positions before these, and to which these are added.
        """
        extend = None if cache is None else functools.partial(cache.extend, self.site)
        if self.writes_all:
            hidden_BTR, fixed_BTC = all_columns(hidden_BTR, fixed_BTC), None
        mixed_BTR = self.attention(self.attention_norm(all_columns(hidden_BTR, fixed_BTC)), cos_TJ, sin_TJ, extend)
        hidden_BTR = hidden_BTR + dropout(mixed_BTR, self.probability, key, f"{self.site}.attention")
        wide_BTR = self.feed_forward(self.feed_forward_norm(all_columns(hidden_BTR, fixed_BTC)))
        return hidden_BTR + dropout(wide_BTR, self.probability, key, f"{self.site}.feed_forward")


def all_columns(hidden_BTR: Tensor, fixed_BTC: Tensor | None) -> Tensor:
    """The residual stream as it is read: its trained columns, then the fixed ones."""
    return hidden_BTR if fixed_BTC is None else torch.cat((hidden_BTR, fixed_BTC), dim=-1)


class FixedColumns(nn.Module):
    """The columns of the residual stream that a bottleneck leaves out: random numbers for every known token.

    They follow from the run's seed, so every stage has them. They are never trained, sent or saved.
    """

    table_VC: Tensor

    def __init__(self, model: ModelConfig, seed: int) -> None:
        super().__init__()
        shape = (model.vocab_size, model.d_model - model.bottleneck_dim)
        uniform_VC = torch.rand(shape, generator=seeded_generator(torch.device("cpu"), seed, "fixed_columns"))
        table_VC = (uniform_VC - 0.5) * (math.sqrt(12) * FIXED_STD)
        self.register_buffer("table_VC", table_VC, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.table_VC)


class Embedding(nn.Module):
    """Tokens to the trained columns of the residual stream."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab_size, model.hidden_width))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class Positions(nn.Module):
    """A trained vector for each position, to be added to the embedding of the token there."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_positions, model.hidden_width))

    def forward(self, embedded_BTR: Tensor, first: int = 0) -> Tensor:
        return embedded_BTR + self.weight[first : first + embedded_BTR.shape[1]]


class Head(nn.Module):
    """Final norm and projection to logits. With tied embeddings it uses the embedding's matrix and has none itself."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(model, model.d_model)
        self.output = None if model.tied_embeddings else nn.Linear(model.d_model, model.vocab_size, bias=False)

    def forward(self, hidden_BTD: Tensor, embedding_VD: Tensor | None) -> Tensor:
        weight_VD = embedding_VD if self.output is None else self.output.weight
        assert weight_VD is not None, "a tied head needs the embedding's matrix"
        return F.linear(self.norm(hidden_BTD), weight_VD)
