"""`[lora]`: adapters that are trained instead of the model's own weights."""

from dataclasses import dataclass, field
from typing import Literal

from swarm.config.checks import (
    MAY_CHANGE,
    STRICT,
    require,
    require_not_negative,
    require_positive,
    require_usable_numbers,
)
from swarm.config.model import ModelConfig

Group = tuple[str, ...]
"""Matrices of a layer, by our modules' names. Their adapters share the first thin matrix, which takes the input."""

ALL_LINEAR = "all-linear"
_LLAMA: dict[str, tuple[Group, ...]] = {
    "q_proj": (("attention.q",),),
    "k_proj": (("attention.k",),),
    "v_proj": (("attention.v",),),
    "o_proj": (("attention.output",),),
    "gate_proj": (("feed_forward.gate",),),
    "up_proj": (("feed_forward.up",),),
    "down_proj": (("feed_forward.down",),),
}
_GPT2: dict[str, tuple[Group, ...]] = {
    # GPT-2 has one matrix for queries, keys and values, with one adapter.
    "c_attn": (("attention.q", "attention.k", "attention.v"),),
    "c_proj": (("attention.output",), ("feed_forward.down",)),
    "c_fc": (("feed_forward.up",),),
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adaptation (LoRA, arXiv 2106.09685).

    The model's own weights stay as they are. Beside some of its matrices two thin ones are trained, whose product is
    added to the matrix.
    """

    __pydantic_config__ = STRICT

    rank: int = 0
    """Columns of the one thin matrix, and rows of the other; 0 trains the model's own weights."""
    alpha: float = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    dropout: float = field(default=0.0, metadata=MAY_CHANGE)
    """Probability with which each input of an adapter is zeroed."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """The matrices of each layer that have an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj; of a GPT-2 c_attn, c_proj and c_fc; or all-linear for all of them."""

    base: Literal["as-is", "nf4"] = field(default="as-is", metadata=MAY_CHANGE)
    """How a peer holds the matrices of layers beside the adapters: as they are given, which is mostly 16 bits a number;
    or in 4 bits, as NF4 with double quantisation (QLoRA, arXiv 2305.14314). An export has them as they were."""

    def __post_init__(self) -> None:
        require_usable_numbers("lora", self)
        require_not_negative("lora", self, "rank")
        require_positive("lora", self, "alpha")
        require(0.0 <= self.dropout < 1.0, f"lora.dropout must be in [0, 1), not {self.dropout}")
        require(bool(self.targets), "lora.targets must name at least one matrix; lora.rank = 0 turns adapters off")
        require(
            ALL_LINEAR not in self.targets or len(self.targets) == 1,
            f"lora.targets: {ALL_LINEAR} means all matrices: leave the others out",
        )

    @property
    def is_on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError unless a model can have these adapters."""
        if not self.is_on:
            return
        require(not model.custom_class, "lora is for the built-in model, not for a model.custom_class")
        require(
            model.versions == "fp32", "model.versions = 'bf16' is for weights that are trained: leave it out with lora"
        )
        require(
            self.base == "as-is" or not model.block_types, "lora.base = 'nf4' is not for a model with model.block_types"
        )
        require(not model.bottleneck_dim, "lora is not for a model with a model.bottleneck_dim")
        require(self.rank <= model.d_model, f"lora.rank ({self.rank}) must not exceed model.d_model ({model.d_model})")
        known = targets_of(model)
        for target in self.targets:
            require(
                target in known or target == ALL_LINEAR,
                f"lora.targets: this model has no {target[:80]!r}, only {', '.join(known)}, or {ALL_LINEAR} for all",
            )

    def groups(self, model: ModelConfig) -> list[Group]:
        """The matrices of a layer that have adapters, in the model's order."""
        known = targets_of(model)
        return [group for name in known if {name, ALL_LINEAR} & {*self.targets} for group in known[name]]


def targets_of(model: ModelConfig) -> dict[str, tuple[Group, ...]]:
    """The groups of a layer's matrices, by the name of each target in transformers."""
    if model.learns_positions:
        return _GPT2
    return {name: groups for name, groups in _LLAMA.items() if name != "gate_proj" or model.is_gated}
