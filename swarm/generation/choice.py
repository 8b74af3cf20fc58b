"""Chooses the next token from a model's logits.

A choice depends only on the logits, the sampling parameters and the token's position. So an interrupted text goes on
with the same tokens, even if another process computes them.
"""

import torch
from torch import Tensor

from swarm.generation.sampling import Sampling
from swarm.model.layers import seeded_generator


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at a position, from the logits of the position before it.

    This computes in float64 on the CPU. Of tokens with equal logits, the lower one counts as the likelier.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    logits_V = logits_V.detach().double().cpu()
    # The largest logit becomes 0. So even at a very low temperature the others become at worst -inf, and never NaN.
    scaled_V = (logits_V - logits_V.max()) / sampling.temperature
    sorted_V, tokens_V = scaled_V.sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    cumulated_V = sorted_V.softmax(-1).cumsum(-1)
    # Keep the likeliest tokens until their probabilities reach top_p, but at least one.
    num_kept = int((cumulated_V < sampling.top_p).sum()) + 1
    cumulated_V = cumulated_V[:num_kept]
    generator = seeded_generator(torch.device("cpu"), "sample", sampling.seed, position)
    drawn = torch.rand((), dtype=torch.float64, generator=generator) * cumulated_V[-1]
    index = min(int(torch.searchsorted(cumulated_V, drawn, right=True)), len(cumulated_V) - 1)
    return int(tokens_V[index])
