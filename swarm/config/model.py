"""`[model]`: the transformer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from swarm.config.checks import (
    MAY_CHANGE,
    STRICT,
    is_sha256,
    require,
    require_at_least_one,
    require_not_negative,
    require_positive,
    require_usable_numbers,
)

MOST_LAYERS = 100_000
"""The most layers of a model: it would take minutes to count more, and no machine could hold them."""
MOST_END_TOKENS = 64
"""The most end tokens of one model."""
_DECIDES = "decides"
BlockType = Literal["tp", "spd", "parallel"]


def _decides(default: Any, when: Callable[["ModelConfig"], bool]) -> Any:
    """A field that decides which function the model computes only where `when` holds."""
    return field(default=default, metadata={_DECIDES: when})


def _inert(default: Any, marks: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A field that never decides which function the model computes."""
    return field(default=default, metadata={_DECIDES: lambda model: False, **marks})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer: decoder-only, Llama-shaped unless switches say otherwise."""

    __pydantic_config__ = STRICT

    num_layers: int = 4
    """Transformer layers over all stages."""
    d_model: int = 256
    """Width of the residual stream."""
    bottleneck_dim: int = 0
    """How many numbers travel between stages for each token, if not d_model. 0: all columns of the residual stream
    travel."""
    bottleneck: Literal["fixed", "learned", "anchored"] = "fixed"
    """With a bottleneck_dim. `fixed`: only these columns of the residual stream are trained, and the others are a fixed
    function of the token, which every stage computes. `learned`: all columns are trained, and where a stage ends, a
    matrix that is trained with the model adds what it reads from all columns to those that travel; another one makes
    all columns of them again. `anchored`: the same, and what is known of the token without the wire is trained as
    well."""
    bottleneck_layers: tuple[int, ...] = ()
    """learned, anchored: the numbers of layers after which the model has a bottleneck. Stages end only there. Empty:
    where the run's stages end, which the first peer fills in."""
    num_heads: int = 4
    """Query heads a layer."""
    num_kv_heads: int = 0
    """Key and value heads a layer (grouped-query attention); 0 means as many as query heads."""
    head_width: int = 0
    """Width of a head, an even number; 0 means d_model / num_heads."""
    d_ff: int = 0
    """Width of the feed-forward block; 0 means 8/3 of d_model, rounded up to a multiple of 32."""
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    """The feed-forward block: gated by SiLU, or two matrices with GELU (its tanh form) in between."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with its bias."""
    qk_norm: bool = False
    """Normalise each query and key head before it is rotated."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    attention_output_bias: bool = False
    """Whether the attention's projection into the residual stream has a bias."""
    feed_forward_bias: bool = False
    """Whether the feed-forward block's projections have biases."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions, or a trained vector for each position that is added to the embedding."""
    max_positions: int = 0
    """Longest sequence that the model takes, and the number of learned positions; 0 means any length, which is not for
    learned positions."""
    vocab_size: int = 256
    """Number of tokens that the embedding has; at least the tokenizer's."""
    bos_token_id: int = _inert(-1, MAY_CHANGE)
    """Token with which a text begins, for an export to name; -1 for none. swarm-model import takes this and the next
    two over from the model."""
    eos_token_ids: tuple[int, ...] = _inert((), MAY_CHANGE)
    """Tokens with which a text ends, unless a generation_config.json beside the run's tokenizer names others."""
    pad_token_id: int = _inert(-1, MAY_CHANGE)
    """Token that fills up short texts of a batch, for an export to name; -1 for none."""
    rope_theta: float = _decides(10_000.0, lambda model: model.is_rotary)
    """Base of the rotary position frequencies."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How rotary frequencies are lowered for sequences longer than a model was first trained with: all of them by
    rope_factor, or as Llama 3.1 does, slow ones by rope_factor, fast ones not at all, with a ramp in between."""
    rope_factor: float = _decides(1.0, lambda model: model.rope_scaling != "none")
    """The factor by which rope_scaling lowers frequencies."""
    rope_low_frequency_factor: float = _decides(1.0, lambda model: model.rope_scaling == "llama3")
    """llama3: waves longer than rope_original_positions over this are slow."""
    rope_high_frequency_factor: float = _decides(4.0, lambda model: model.rope_scaling == "llama3")
    """llama3: waves shorter than rope_original_positions over this are fast."""
    rope_original_positions: int = _decides(8192, lambda model: model.rope_scaling == "llama3")
    """llama3: the longest sequence that the model was first trained with."""
    norm_epsilon: float = 1e-5
    """Added to the mean square, or the variance, by the norm."""
    init_std: float = _inert(0.02)
    """Standard deviation of the initial weights; projections into the residual stream get it / sqrt(2 * num_layers)."""
    tied_embeddings: bool = False
    """Use the embedding matrix as the output head as well."""
    dropout: float = _inert(0.0, MAY_CHANGE)
    """Probability of zeroing, after the embedding and after each attention and feed-forward block."""
    block_types: str | tuple[str, ...] = _decides("", lambda model: bool({*model.types_of_blocks} - {"tp"}))
    """`tp`, `spd` or `parallel` for all layers, or a list with one of them for each: how the shards of a layer work
    together (docs/block-types.md). Of these, `tp` computes what the model computes without this field, and the others
    do not."""
    num_shards: int = _decides(1, lambda model: bool({*model.types_of_blocks} - {"tp"}))
    """With block_types: into how many shards the heads and the feed-forward columns of each layer are divided."""
    autocast: Literal["off", "bf16", "fp16", "auto"] = _inert("off", MAY_CHANGE)
    """Run matrix products in bfloat16 or float16, with float32 weights and gradients. fp16 is for GPUs that would only
    emulate bfloat16; in the backward each stage scales its gradients by a power of two, so that small ones survive.
    `auto`: bf16 on a GPU that computes in it, fp16 on an older one, `off` elsewhere. A peer may choose another type for
    itself (--dtype)."""
    versions: Literal["fp32", "bf16"] = _inert("fp32", MAY_CHANGE)
    """The type of the versions of the weights, the copies of matrices that microbatches compute with. With `bf16` a
    version takes two bytes a parameter; the weights that the optimizer steps stay in float32, and sums of gradients
    too. Not for adapters (LoRA), which take little."""
    gradient_checkpointing: bool = _inert(False, MAY_CHANGE)
    """Keep only each layer's input for the backward and compute the layer again."""
    weights: str = _inert("")
    """Digest of the weights that the run begins with, which swarm-model import shows; empty: they are drawn from
    data.seed."""
    custom_class: str | tuple[str | tuple[str, ...], ...] = ""
    """`package.module:Class` of your own model (docs/operations.md has the requirements); empty: the built-in one. Or a
    list with an entry for each path: a class for all of its blocks, or a list with one for each stage. Paths that share
    a block name the same class for it."""

    def __post_init__(self) -> None:
        require_usable_numbers("model", self)
        require_at_least_one("model", self, "num_layers", "d_model", "num_heads", "vocab_size")
        require_not_negative("model", self, "num_kv_heads", "head_width", "d_ff", "max_positions")
        require_positive("model", self, "norm_epsilon", "init_std")
        require(
            self.num_layers <= MOST_LAYERS, f"model.num_layers must be at most {MOST_LAYERS}, not {self.num_layers}"
        )
        self._check_positions()
        self._check_special_tokens()
        require(self.head_width % 2 == 0, f"model.head_width must be even, not {self.head_width}")
        require(
            bool(self.head_width) or self.d_model % (2 * self.num_heads) == 0,
            f"model.d_model ({self.d_model}) must be an even multiple of model.num_heads ({self.num_heads}), "
            "or model.head_width be set",
        )
        require(
            self.num_heads % self.kv_heads == 0,
            f"model.num_kv_heads ({self.kv_heads}) must divide model.num_heads ({self.num_heads})",
        )
        self._check_bottleneck()
        require(
            not self.weights or is_sha256(self.weights),
            f"model.weights must be the 64 hexadecimal digits that swarm-model shows, not {self.weights[:80]!r}",
        )
        require(
            not (self.weights and self.custom_class),
            "model.weights is for the built-in model, not for a model.custom_class",
        )
        require(
            self.versions == "fp32" or not self.custom_class,
            "model.versions = 'bf16' is for the built-in model, not for a model.custom_class",
        )
        require(0.0 <= self.dropout < 1.0, f"model.dropout must be in [0, 1), not {self.dropout}")
        self._check_blocks()

    def _check_bottleneck(self) -> None:
        require(
            0 <= self.bottleneck_dim < self.d_model,
            f"model.bottleneck_dim must be at least 0 and below model.d_model ({self.d_model}), "
            f"not {self.bottleneck_dim}",
        )
        require(
            not (self.bottleneck_dim and self.custom_class),
            "model.bottleneck_dim is for the built-in model, not for a model.custom_class",
        )
        if not self.learns_bottlenecks:
            require(
                not (self.bottleneck_dim and self.tied_embeddings),
                "model.tied_embeddings is not for model.bottleneck_dim: few columns of that embedding are trained",
            )
            require(not self.bottleneck_layers, "model.bottleneck_layers is for learned and anchored bottlenecks")
            return
        require(self.bottleneck_dim > 0, f"model.bottleneck = {self.bottleneck!r} needs a model.bottleneck_dim")
        require(
            not self.weights,
            f"model.bottleneck = {self.bottleneck!r} is for weights that are drawn, not for model.weights",
        )
        after = self.bottleneck_layers
        require(
            all(one < other for one, other in pairwise((0, *after, self.num_layers)) if after),
            f"model.bottleneck_layers must be numbers that rise, above 0 and below model.num_layers "
            f"({self.num_layers}), not {', '.join(map(str, after[:20]))}",
        )

    def _check_blocks(self) -> None:
        require_at_least_one("model", self, "num_shards")
        if not self.block_types:
            require(self.num_shards == 1, "model.num_shards is for layers that have model.block_types")
            return
        named = [self.block_types] if isinstance(self.block_types, str) else self.block_types
        known = get_args(BlockType)
        for name in named:
            require(name in known, f"model.block_types: there is no {name[:80]!r}, only {', '.join(known)}")
        require(
            isinstance(self.block_types, str) or len(self.block_types) == self.num_layers,
            f"model.block_types has {len(self.block_types)} entries for {self.num_layers} layers",
        )
        require(self.num_shards > 1, "model.block_types needs a model.num_shards of 2 or more")
        for what, number in (
            ("model.num_heads", self.num_heads),
            ("model.num_kv_heads", self.kv_heads),
            ("model.d_ff", self.feed_forward_width),
        ):
            require(
                number % self.num_shards == 0,
                f"{what} ({number}) must be a multiple of model.num_shards ({self.num_shards})",
            )
        for name, is_set in (("bottleneck_dim", self.bottleneck_dim), ("custom_class", self.custom_class)):
            require(not is_set, f"model.block_types is not for a model with a model.{name}")

    def _check_positions(self) -> None:
        require_at_least_one("model", self, "rope_original_positions")
        require_positive("model", self, "rope_theta", "rope_factor", "rope_low_frequency_factor")
        require(
            self.rope_low_frequency_factor < self.rope_high_frequency_factor,
            f"model.rope_low_frequency_factor ({self.rope_low_frequency_factor}) must be below "
            f"model.rope_high_frequency_factor ({self.rope_high_frequency_factor})",
        )
        if self.learns_positions:
            require(self.max_positions > 0, "model.positions = 'learned' needs model.max_positions")
            require(self.rope_scaling == "none", "model.rope_scaling is for model.positions = 'rope'")

    def _check_special_tokens(self) -> None:
        require(
            len(self.eos_token_ids) <= MOST_END_TOKENS,
            f"model.eos_token_ids must name at most {MOST_END_TOKENS} tokens, not {len(self.eos_token_ids)}",
        )
        tokens = [("eos_token_ids", token, 0) for token in self.eos_token_ids]
        tokens += [("bos_token_id", self.bos_token_id, -1), ("pad_token_id", self.pad_token_id, -1)]
        for name, token, least in tokens:
            require(
                least <= token < self.vocab_size,
                f"model.{name} must be at least {least} and below model.vocab_size ({self.vocab_size}), not {token}",
            )

    @property
    def function(self) -> dict[str, object]:
        """What decides which function the model computes: all fields that are not marked as inert here, with defaults
        resolved."""
        resolved = {
            "num_kv_heads": self.kv_heads, "head_width": self.width_of_heads, "d_ff": self.feed_forward_width
        }  # fmt: skip
        return {
            each.name: resolved.get(each.name, getattr(self, each.name))
            for each in fields(self)
            if _DECIDES not in each.metadata or each.metadata[_DECIDES](self)
        }

    @property
    def types_of_blocks(self) -> tuple[BlockType, ...]:
        """The block type of each layer; empty if the model has none."""
        if not self.block_types:
            return ()
        is_one = isinstance(self.block_types, str)
        return cast(tuple[BlockType, ...], (self.block_types,) * self.num_layers if is_one else self.block_types)

    @property
    def learns_bottlenecks(self) -> bool:
        """Whether matrices that are trained bring the residual stream through bottlenecks."""
        return self.bottleneck != "fixed"

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block has a gate: a second matrix that reads, beside the one called up."""
        return self.feed_forward == "swiglu"

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return self.positions == "rope"

    @property
    def learns_positions(self) -> bool:
        """Whether a trained vector for each position is added to the embedding."""
        return self.positions == "learned"

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def width_of_heads(self) -> int:
        return self.head_width or self.d_model // self.num_heads

    @property
    def hidden_width(self) -> int:
        """How many numbers travel from stage to stage for each token."""
        return self.bottleneck_dim or self.d_model

    @property
    def trained_width(self) -> int:
        """How many columns of the residual stream are trained; with a fixed bottleneck all only in the last layer."""
        return self.d_model if self.learns_bottlenecks else self.hidden_width

    @property
    def feed_forward_width(self) -> int:
        return self.d_ff or 32 * -(-8 * self.d_model // (3 * 32))
