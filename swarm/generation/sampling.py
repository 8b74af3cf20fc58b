"""The parameters with which tokens are chosen. generation/choice chooses them; this file needs no torch."""

import math
from dataclasses import dataclass

MOST_TOP_K = 2**31
"""More than any vocabulary has."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: choose only among the likeliest tokens that together have this probability; 0 takes the likeliest, 1 all.
        top_k: choose only among this many of the likeliest tokens; 0 takes all.
        seed: seed of the random numbers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or positive, not {self.temperature}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be from 0 to 1, not {self.top_p}")
        if not 0 <= self.top_k < MOST_TOP_K:
            raise ValueError(f"top_k must be at least 0 and below {MOST_TOP_K}, not {self.top_k}")
