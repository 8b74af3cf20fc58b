"""How the next token is chosen from a model's logits.

A choice follows from the logits, the parameters and the token's position alone. So a text that was broken off goes on
with the same tokens, whatever computes them from then on.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model.layers import seeded_generator


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: only the likeliest tokens that have this probability together; 1 takes all.
        top_k: only so many of the likeliest; 0 takes all.
        seed: of the random numbers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or positive, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k}")


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at a position, from the logits of the position before it.

    Computed in float64 on the CPU. Of equal logits the lower token is the likelier one.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    scaled_V = logits_V.detach().double().cpu() / sampling.temperature
    sorted_V, tokens_V = scaled_V.sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    cumulated_V = sorted_V.softmax(-1).cumsum(-1)
    # As many as it takes to reach top_p, and one at least.
    num_kept = int((cumulated_V < sampling.top_p).sum()) + 1
    cumulated_V = cumulated_V[:num_kept]
    generator = seeded_generator(torch.device("cpu"), "sample", sampling.seed, position)
    drawn = torch.rand((), dtype=torch.float64, generator=generator) * cumulated_V[-1]
    index = min(int(torch.searchsorted(cumulated_V, drawn, right=True)), len(cumulated_V) - 1)
    return int(tokens_V[index])
