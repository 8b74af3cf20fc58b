"""How the next token is chosen from a model's logits.

A choice follows from the logits, the parameters and the token's position alone. So a text that was broken off goes on
with the same tokens, whatever computes them from then on.
"""

import torch
from torch import Tensor

from swarm.generation.sampling import Sampling
from swarm.model.layers import seeded_generator


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at a position, from the logits of the position before it.

    Computed in float64 on the CPU. Of equal logits the lower token is the likelier one.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    logits_V = logits_V.detach().double().cpu()
    # However low the temperature, the largest is 0, and the others are -inf at the lowest.
    scaled_V = (logits_V - logits_V.max()) / sampling.temperature
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
