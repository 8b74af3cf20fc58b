"""Which answers are farther from what another peer of the block computes again than the drift of its weights explains.

With DiLoCo the peers of a block take inner steps of their own, so an honest answer agrees only roughly. How roughly
depends on the model, the learning rate and the steps since the last average. So a peer that checks remembers how the
last answer of each other peer compared, and takes the medians for what is usual: a minority of liars cannot move them
far (SENTINEL compares with running means). An answer is out of line only if it is also beyond a fixed bound, so no
minority can have an honest one found wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch

from swarm.honesty.comparison import DEVIATIONS, spread

LEAST_SEEN = 2
"""As many other peers must have been checked by a peer before it can say of one that it is out of line."""
LEAST_COSINE = 0.4
"""Directions are compared only if the usual cosine is as large as this."""
COSINE_SHARE, NORM_FACTOR = 0.2, 2.5
"""An answer is in line with at least this share of the usual cosine, and with a norm between the usual one divided by
this and times this, whatever the deviation."""
MOST_SEEN = 64
"""The peers that are remembered."""
LEAST_CHANGE = 0.05
"""The direction of what a stage adds to the hidden state that came is compared only if that is at least this share of
the sum, because rounding might be as large as a smaller one."""
FIRST_ROUND = 2
"""Before it nothing is compared: the first steps of all change a model out of recognition."""
_SHORTEST = 1e-30
_FARTHEST = 200.0
"""The logarithm of a norm beyond all that float32 holds. A median with infinity or NaN in it would say nothing."""


class Likeness(NamedTuple):
    """How a tensor that a peer told compares with the one that was computed again.

    Attributes:
        cosine: between the two; 0 if one of them is zero.
        log_ratio: the natural logarithm of the first one's norm over the other one's.
    """

    cosine: float
    log_ratio: float

    @classmethod
    def of(cls, told: torch.Tensor, made: torch.Tensor, came: torch.Tensor | None = None) -> Self:
        """Compare a hidden state or a gradient (B, T, R), or a single number.

        Directions are those of what a stage adds to the hidden state that came, which passes through it mostly
        unchanged, and without the mean over all tokens, which all texts share. (Of what a backward adds, those of
        honest peers differ too much.)
        """
        told_norm, made_norm = (max(float(each.norm()), _SHORTEST) for each in (told, made))
        if came is not None and float((made - came).norm()) >= LEAST_CHANGE * made_norm:
            told, made = told - came, made - came
        if made.ndim > 1:
            told, made = (each - each.mean((0, 1)) for each in (told, made))
        lengths = float(told.norm()), float(made.norm())
        cosine = float((told * made).sum()) / max(_SHORTEST, lengths[0] * lengths[1]) if any(lengths) else 1.0
        log_ratio = math.log(told_norm / made_norm)
        if not math.isfinite(cosine + log_ratio):
            return cls(-1.0, _FARTHEST)
        return cls(cosine, log_ratio)


@dataclass(eq=False)
class Drift:
    """What one peer has seen of the others' answers."""

    _last: dict[str, Mapping[str, Likeness]] = field(default_factory=dict, init=False)
    """By peer, how its last answer compared, by what was compared."""

    def fault(self, peer_id: str, found: Mapping[str, Likeness]) -> str | None:
        """Take in how an answer compares. Returns what is out of line, in words; empty if nothing is, and None if too
        few other peers were seen to tell."""
        self._last.pop(peer_id, None)
        others = list(self._last.values())
        self._last[peer_id] = found
        if len(self._last) > MOST_SEEN:
            del self._last[next(iter(self._last))]
        faults = list[str]()
        for name, told in found.items():
            seen_P2 = np.array([each[name] for each in others if name in each]).reshape(-1, 2)
            if len(seen_P2) < LEAST_SEEN:
                return None
            cosine, log_ratio = np.median(seen_P2, axis=0)
            bound = min(COSINE_SHARE * cosine, cosine - DEVIATIONS * spread(seen_P2[:, 0]))
            if cosine >= LEAST_COSINE and not told.cosine >= bound:
                faults.append(f"its {name} has a cosine of {told.cosine:.2f} with what follows, usual is {cosine:.2f}")
            most = max(math.log(NORM_FACTOR), DEVIATIONS * spread(seen_P2[:, 1]))
            if not abs(told.log_ratio - log_ratio) <= most:
                faults.append(f"its {name} has {math.exp(told.log_ratio):.2g} times the norm of what follows")
        return faults[0] if faults else ""
