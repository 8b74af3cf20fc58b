"""`[stages]` and `[wire]`: how the layers are cut into stages, and what travels between these."""

from dataclasses import dataclass
from typing import Literal

from swarm.config.checks import STRICT, require, require_usable_numbers
from swarm.machine.words import counted


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """How the layers are cut into stages."""

    __pydantic_config__ = STRICT

    num_stages: int = 3
    """Stages in the pipeline; stage 0 also holds the embedding, the last one the head and the loss."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage; empty means as even as possible, the remainder to the middle stages first."""

    def __post_init__(self) -> None:
        require_usable_numbers("stages", self)
        require(1 <= self.num_stages <= 4096, f"stages.num_stages must be between 1 and 4096, not {self.num_stages}")
        if self.layers_per_stage:
            require(
                len(self.layers_per_stage) == self.num_stages,
                f"stages.layers_per_stage has {counted(len(self.layers_per_stage), 'entry')} for "
                f"{counted(self.num_stages, 'stage')}",
            )
            require(min(self.layers_per_stage) >= 0, "stages.layers_per_stage must not be negative")


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How activations and their gradients travel between stages."""

    __pydantic_config__ = STRICT

    dtype: Literal["fp32", "bf16", "fp16", "int8", "auto"] = "fp32"
    """Type of numbers on the wire; computation stays as it is. `fp16`: with a scale for each tensor, so that small
    gradients survive. `int8`: a byte each, and a scale for every 128. All but `fp32` round numbers; a synchronous run
    then follows one process that rounds at the same places. `auto`, which the first peer replaces:
    `bf16`, but `fp32` in a synchronous run."""
