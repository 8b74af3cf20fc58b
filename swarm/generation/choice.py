"""Chooses the next token from a model's logits, and scores tokens.

A choice depends only on the logits, the sampling parameters and the token's position. So an interrupted text goes on
with the same tokens, even if another process computes them.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.generation.sampling import Sampling, Scores, Scoring
from swarm.model.layers import seeded_generator

_ROWS = 32
"""How many positions are scored together, which takes as much memory again as their logits."""
NO_SCORING = Scoring(first=sys.maxsize, num_top=0)
"""Scores no token of any sequence."""


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at a position, from the logits of the position before it.

    This sorts where the logits are, and computes in float64 on the CPU. Of tokens with equal logits, the lower one
    counts as the likelier.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    sorted_V, tokens_V = logits_V.detach().sort(descending=True, stable=True)
    sorted_V = sorted_V.cpu().double()
    # The largest logit becomes 0. So even at a very low temperature the others become at worst -inf, and never NaN.
    sorted_V = (sorted_V - sorted_V[0]) / sampling.temperature
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


class Scorer:
    """Scores the tokens of one sequence as it is computed piece by piece."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self._scores = Scores(scoring)
        self._num_positions = 0
        self._last_V: Tensor | None = None
        """What the score of the next token follows from, if that one is wanted."""

    def num_logits(self, count: int) -> int:
        """How many of the next positions' logits are needed: those of the last ones."""
        return min(count, max(1, self._num_positions + count - self._scoring.first + 1))

    def add_positions(self, tokens_T: Sequence[int], logits_NV: Tensor) -> None:
        """Score the tokens of the next positions.

        Args:
            logits_NV: those of the last `num_logits` of these positions.
        """
        before_NV = logits_NV[:-1] if self._last_V is None else torch.cat([self._last_V[None], logits_NV[:-1]])
        self._score(tokens_T[len(tokens_T) - len(before_NV) :], before_NV)
        self._num_positions += len(tokens_T)
        self._last_V = logits_NV[-1].clone() if self._num_positions >= self._scoring.first else None

    def add_chosen(self, token: int) -> None:
        if self._last_V is not None:
            self._score([token], self._last_V[None])
            self._last_V = None

    def take(self) -> Scores:
        taken, self._scores = self._scores, Scores(self._scoring)
        return taken

    def _score(self, tokens_N: Sequence[int], logits_NV: Tensor) -> None:
        for start in range(0, len(tokens_N), _ROWS):
            logprobs_NV = logits_NV[start : start + _ROWS].log_softmax(-1)
            own_N1 = torch.tensor(tokens_N[start : start + _ROWS], device=logprobs_NV.device)[:, None]
            values_NK, top_NK = logprobs_NV.topk(self._scoring.num_top)
            self._scores.extend(
                logprobs_NV.gather(1, own_N1)[:, 0].tolist(), top_NK.flatten().tolist(), values_NK.flatten().tolist()
            )
