"""The parts of a decoder-only transformer.

Modules hold no state but parameters: dropout masks are made anew in every forward pass, so the same inputs and the same
key give the same outputs whenever, and however often, they are computed. The global random state and `training` make no
difference.

Shape suffixes: B samples, T positions, D model width, J half a head's width, F feed-forward width, V vocabulary, R
trained columns of the residual stream (D, or model.bottleneck_dim), C its other columns.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.attention import Attend, CausalSelfAttention, Documents, attention
from swarm.model.cache import Cache, LayerPiece
from swarm.model.functions import make_norm, product, rows, swiglu
from swarm.model.loss import summed_loss
from swarm.model.masks import Dropout, DropoutKey, key_digest
from swarm.model.projection import Projection, WritingProjection
from swarm.model.shards import SUBLAYERS, Shards, Sublayer

FIXED_STD = 0.2
"""Standard deviation of the columns that a bottleneck leaves out. It was the best of 0.02, 0.2 and 1 for a small model.
These columns cannot grow in training, so they begin larger than the trained ones."""


def seeded_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator whose numbers follow from `key` alone, in every process and Python version."""
    return torch.Generator(device).manual_seed(int.from_bytes(key_digest(*key)[:8], "big"))


def draw(parameter: Tensor, bound: float, seed: int, name: str) -> None:
    """Set a parameter, on the CPU, to numbers between -bound and bound that follow from seed and name.

    They are uniform, because normal ones need logarithms and cosines, which differ in the last bit between processors.
    """
    parameter.copy_(torch.rand(parameter.shape, generator=seeded_generator(torch.device("cpu"), seed, name)))
    parameter.sub_(0.5).mul_(2 * bound)


class FeedForward(nn.Module):
    """The feed-forward block: down(silu(gate(x)) * up(x)) (arXiv 2002.05202), or without a gate down(gelu(up(x))), with
    the tanh approximation of GELU (arXiv 1606.08415, section 2).

    The matrices are named gate (where `model.is_gated`), up and down: shards.py, stages.py and config/lora.py go by
    these names.
    """

    def __init__(self, model: ModelConfig, output_width: int, shards: Shards | None, *, fused: bool) -> None:
        """`fused`: see functions.py."""
        super().__init__()
        self.fused = fused
        width, bias = model.feed_forward_width, model.feed_forward_bias
        self.gate = Projection(model.d_model, width, bias=bias) if model.is_gated else None
        self.up = Projection(model.d_model, width, bias=bias)
        self.down = WritingProjection(width, output_width, bias=bias, shards=shards)

    def forward(self, hidden_BTD: Tensor, key: DropoutKey | None = None) -> Tensor:
        if self.gate is None:
            wide_BTF = F.gelu(self.up(hidden_BTD, key), approximate="tanh")
        else:
            wide_BTF = swiglu(self.gate(hidden_BTD, key), self.up(hidden_BTD, key), fused=self.fused)
        output_BTR: Tensor = self.down(wide_BTF, key)
        return output_BTR


class TransformerLayer(nn.Module):
    """One pre-norm layer. Its index in the whole model, `layer`, names its dropout.

    With a fixed bottleneck a layer reads all columns of the residual stream and writes the trained ones. The model's
    last layer writes all of them, because nothing travels after it.

    Of a learned bottleneck (ResBM, arXiv 2604.11947) the layer before has the encoder E and the layer behind the
    decoder D. Where x are all columns and x_R the first R of them, z = x_R + E x travels. With the fixed columns c of
    the tokens, as in MAPL's anchors (arXiv 2606.05484), the layer behind goes on with y + D y, where y = (z, c). So the
    first columns pass through unchanged, with their gradients, and training begins with E = D = 0.

    An anchored bottleneck goes on with (z, 0) + D y, and D is drawn like other matrices. So c, which is larger than
    what layers write and would stay in the stream, only chooses what D adds for a token: a trained embedding.
    """

    def __init__(self, model: ModelConfig, layer: int, shards: Shards | None = None, *, fused: bool = False) -> None:
        """
        Args:
            shards: the shards that the layer's heads and feed-forward columns are divided among, if any. `model` then
                has the sizes of those that this process holds, and hidden_BTR is their streams [N, B, T, R].
        """
        super().__init__()
        self.fused = fused
        decodes, encodes = layer in model.bottleneck_layers, layer + 1 in model.bottleneck_layers
        self.reads_fixed_columns = decodes or (model.bottleneck_dim > 0 and not model.learns_bottlenecks)
        self.writes_all = model.learns_bottlenecks or layer == model.num_layers - 1
        width = model.d_model if self.writes_all else model.hidden_width
        self.site = f"layers.{layer}"
        self.attention_norm = make_norm(model, model.d_model, fused=fused)
        self.attention = CausalSelfAttention(model, width, shards, fused=fused)
        self.attention_dropout = Dropout(model.dropout, f"{self.site}.attention")
        self.feed_forward_norm = make_norm(model, model.d_model, fused=fused)
        self.feed_forward = FeedForward(model, width, shards, fused=fused)
        self.feed_forward_dropout = Dropout(model.dropout, f"{self.site}.feed_forward")
        self.decoder = nn.Linear(model.d_model, model.d_model, bias=False) if decodes else None
        self.num_dropped = model.d_model - model.bottleneck_dim if model.bottleneck == "anchored" else 0
        """How many of the columns that the decoder reads go no further: the last ones, which are fixed."""
        self.encoder = nn.Linear(model.d_model, model.bottleneck_dim, bias=False) if encodes else None

    def forward(
        self, hidden_BTR: Tensor, fixed_BTC: Tensor | None, cos_TJ: Tensor | None, sin_TJ: Tensor | None,
        key: DropoutKey | None, reach: Cache | LayerPiece | Documents | None = None,
        sublayers: Sequence[Sublayer] = SUBLAYERS,
    ) -> Tensor:  # fmt: skip
        """
        Args:
            fixed_BTC: the columns that are not trained, if there is a bottleneck.
            cos_TJ, sin_TJ: as rotary_tables makes them, if positions are rotary.
            reach: what positions attend to: the positions in a cache, to which these are added, or to which the caller
                adds them; or their document; if None, all earlier positions of their row.
            sublayers: the parts of the layer that are computed.
        """
        if fixed_BTC is not None and self.writes_all:
            if self.reads_fixed_columns:
                hidden_BTR = all_columns(hidden_BTR, fixed_BTC)
            fixed_BTC = None
        if self.decoder is not None:
            decoded_BTD = product(hidden_BTR, self.decoder.weight)
            if self.num_dropped:
                hidden_BTR = F.pad(hidden_BTR[..., : -self.num_dropped], (0, self.num_dropped))
            hidden_BTR = hidden_BTR + decoded_BTD
        if "attention" in sublayers:
            normed_BTD = self._cast_once(self.attention_norm(all_columns(hidden_BTR, fixed_BTC)))
            mixed_BTR = self.attention(normed_BTD, cos_TJ, sin_TJ, self._attend(reach), key)
            hidden_BTR = hidden_BTR + self.attention_dropout(mixed_BTR, key)
        if "feed_forward" in sublayers:
            normed_BTD = self._cast_once(self.feed_forward_norm(all_columns(hidden_BTR, fixed_BTC)))
            hidden_BTR = hidden_BTR + self.feed_forward_dropout(self.feed_forward(normed_BTD, key), key)
        if self.encoder is not None:
            weight_RD = self.encoder.weight
            hidden_BTR = hidden_BTR[..., : len(weight_RD)] + product(hidden_BTR, weight_RD)
        return hidden_BTR

    def _cast_once(self, normed_BTD: Tensor) -> Tensor:
        """Cast what several matrices read to autocast's type, which would otherwise do so for each of them."""
        device = normed_BTD.device.type
        if not (self.fused and torch.is_autocast_enabled(device)):
            return normed_BTD
        return normed_BTD.to(torch.get_autocast_dtype(device))

    def _attend(self, reach: Cache | LayerPiece | Documents | None) -> Attend:
        # The layer's name is read for a cache alone: compiled code that depends on it holds for a single layer.
        if reach is None:
            return attention
        return reach.attend if isinstance(reach, Documents | LayerPiece) else functools.partial(reach.attend, self.site)


def all_columns(hidden_BTR: Tensor, fixed_BTC: Tensor | None) -> Tensor:
    """The residual stream as layers read it: its trained columns, then the fixed ones."""
    return hidden_BTR if fixed_BTC is None else torch.cat((hidden_BTR, fixed_BTC), dim=-1)


class FixedColumns(nn.Module):
    """The columns of the residual stream that a bottleneck leaves out: random numbers for each token of the vocabulary.

    The numbers follow from the run's seed, so every stage has them. They are never trained, sent or saved.
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
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab_size, model.trained_width))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return rows(tokens_BT, self.weight)


class Positions(nn.Module):
    """Adds a trained vector for each position to the embedding of the token there."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_positions, model.trained_width))

    def forward(self, embedded_BTR: Tensor, positions_T: Tensor) -> Tensor:
        return embedded_BTR + rows(positions_T, self.weight)


class Head(nn.Module):
    """Final norm, and projection to logits or the loss. With tied embeddings it uses the embedding's matrix."""

    def __init__(self, model: ModelConfig, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.norm = make_norm(model, model.d_model, fused=fused)
        self.output = None if model.tied_embeddings else nn.Linear(model.d_model, model.vocab_size, bias=False)

    def forward(
        self, hidden_BTD: Tensor, embedding_VD: Tensor | None, targets_BT: Tensor | None = None,
        gradient_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return logits_BTV, or with targets the sum of their losses, whose gradients are scaled."""
        weight_VD = embedding_VD if self.output is None else self.output.weight
        assert weight_VD is not None, "a tied head needs the embedding's matrix"
        if targets_BT is not None:
            normed_BTD = self.norm(hidden_BTD)
            return summed_loss(normed_BTD, weight_VD, targets_BT, fused=self.fused, gradient_scale=gradient_scale)
        return product(self.norm(hidden_BTD), weight_VD)
