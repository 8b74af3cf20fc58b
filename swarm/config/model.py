"""`[model]`: the transformer."""

from dataclasses import dataclass
from typing import Literal

from swarm.config.checks import (
    STRICT,
    require,
    require_at_least_one,
    require_not_negative,
    require_positive,
    require_usable_numbers,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer: decoder-only, Llama-shaped."""

    __pydantic_config__ = STRICT

    num_layers: int = 4
    """Transformer layers over all stages."""
    d_model: int = 256
    """Width of the residual stream."""
    bottleneck_dim: int = 0
    """Columns of the residual stream that are trained, and travel between stages; the other columns are a fixed
    function of the token, which every stage computes. 0: all of them are."""
    num_heads: int = 4
    """Query heads a layer; d_model is an even multiple of it."""
    num_kv_heads: int = 0
    """Key and value heads a layer (grouped-query attention); 0 means as many as query heads."""
    d_ff: int = 0
    """Width of the SwiGLU; 0 means 8/3 of d_model, rounded up to a multiple of 32."""
    vocab_size: int = 256
    """Tokens the embedding knows; at least the tokenizer's."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream get it / sqrt(2 * num_layers)."""
    tied_embeddings: bool = False
    """Use the embedding matrix as the output head as well."""
    dropout: float = 0.0
    """Probability of zeroing, after the embedding and after each attention and feed-forward block."""
    autocast: Literal["off", "bf16"] = "off"
    """Run matrix products in bfloat16, with float32 weights and gradients."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward and compute the layer again."""
    custom_class: str = ""
    """`package.module:Class` of your own model (docs/operations.md has the requirements); empty: the built-in one."""

    def __post_init__(self) -> None:
        require_usable_numbers("model", self)
        require_at_least_one("model", self, "num_layers", "d_model", "num_heads", "vocab_size")
        require_not_negative("model", self, "num_kv_heads", "d_ff")
        require_positive("model", self, "rope_theta", "norm_epsilon", "init_std")
        require(
            self.d_model % (2 * self.num_heads) == 0,
            f"model.d_model ({self.d_model}) must be an even multiple of model.num_heads ({self.num_heads})",
        )
        require(
            self.num_heads % self.kv_heads == 0,
            f"model.num_kv_heads ({self.kv_heads}) must divide model.num_heads ({self.num_heads})",
        )
        require(
            0 <= self.bottleneck_dim < self.d_model,
            f"model.bottleneck_dim must be at least 0 and below model.d_model ({self.d_model}), "
            f"not {self.bottleneck_dim}",
        )
        require(
            not (self.bottleneck_dim and self.tied_embeddings),
            "model.tied_embeddings is not for model.bottleneck_dim: few columns of that embedding are trained",
        )
        require(
            not (self.bottleneck_dim and self.custom_class),
            "model.bottleneck_dim is for the built-in model, not for a model.custom_class",
        )
        require(0.0 <= self.dropout < 1.0, f"model.dropout must be in [0, 1), not {self.dropout}")

    @property
    def kv_heads(self) -> int:
        """Key and value heads with the default resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def hidden_width(self) -> int:
        """Numbers a token that travel from stage to stage."""
        return self.bottleneck_dim or self.d_model

    @property
    def feed_forward_width(self) -> int:
        """d_ff with the default resolved."""
        return self.d_ff or 32 * -(-8 * self.d_model // (3 * 32))
