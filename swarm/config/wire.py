"""`[wire]`: how hidden states and gradients travel between stages."""

from dataclasses import dataclass
from typing import Literal

from swarm.config.checks import STRICT


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How activations and their gradients travel between stages."""

    __pydantic_config__ = STRICT

    dtype: Literal["fp32", "bf16", "fp16", "int8", "auto"] = "fp32"
    """Type of numbers on the wire; computation stays as it is. `fp16`: with a scale for each tensor, so that small
    gradients survive. `int8`: a byte each, and a scale for every 128. All but `fp32` round numbers; a synchronous run
    then follows one process that rounds at the same places. `auto`, which the first peer replaces:
    `bf16`, but `fp32` in a synchronous run."""
