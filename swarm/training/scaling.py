"""How gradients are scaled: down where their norm is larger than `optimizer.clip_norm`, and up in a float16 backward.

Who clips by which norm:

- DiLoCo: each peer clips the mean gradient of an inner batch, by the norm over its own stage.
- Synchronous: all stages clip by one norm over the whole model. Members of a stage know that of their average, the
  stages' leaders tell it to each other (averaging/barrier), and each commit brings the sum (averaging/round).
- swarm-static: all workers clip by one norm, to which each adds its share (peers/static/loop).

Losses are multiplied by a power of two before a backward in float16, so that gradients neither vanish nor overflow and
nothing is rounded. What overflows is computed again with half the factor. (Micikevicius et al., arXiv 1710.03740, skip
such a step, and so take fewer steps than with other types.)
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from swarm.config import RunConfig
from swarm.machine.memory import Recycler

Gradients = Mapping[str, torch.Tensor]
MEAN_SCALE = 2.0**16
"""The first factor for mean losses; torch.amp.GradScaler has the same one."""
GROWS_AFTER = 2000
"""After how many successes in a row the factor is doubled, as in torch.amp.GradScaler."""
MOST_DOUBLINGS = 8
"""A stage's factor leaves its first value by so many doublings or halvings at the most. At its lowest, gradients keep
about as many digits as bfloat16 has, so what a neighbour sends can spoil no gradients but its own."""


def needs_norm_of_model(config: RunConfig) -> bool:
    """Whether a stage's gradients are clipped by a norm to which other stages contribute."""
    return config.rounds.synchronous and config.optimizer.clip_norm > 0.0


# -- scaling -----------------------------------------------------------------------------------------------------------


def clip(gradients: Gradients, squared_norm: float, max_norm: float, *, scale: float = 1.0) -> None:
    """Clip gradients in place. They are too large by `scale`, which is taken out too; `squared_norm` is without it."""
    factor = clip_factor(squared_norm, max_norm) / scale
    if factor != 1.0:
        torch._foreach_mul_(list(gradients.values()), factor)


def clipped(gradients: Gradients, squared_norm: float, max_norm: float, memory: Recycler) -> Gradients:
    """The clipped gradients, in memory of their own unless they are small enough as they are."""
    factor = clip_factor(squared_norm, max_norm)
    if factor == 1.0:
        return gradients
    scaled = memory.like(gradients)
    for name, gradient in gradients.items():
        torch.mul(gradient, factor, out=scaled[name])
    return scaled


def clip_factor(squared_norm: float, max_norm: float) -> float:
    """The factor, at most 1, that brings the norm down to `max_norm`. A `max_norm` of 0 means no limit."""
    norm = math.sqrt(squared_norm)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm


# -- norms -------------------------------------------------------------------------------------------------------------


def squared_norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """The sum of squares over all elements, as `squared_norms` has it."""
    return sum(squared_norms(tensors), 0.0)


def squared_norms(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Each tensor's sum of squares, in float64; within a tensor on MPS in float32, the widest type there."""
    found = list(tensors)
    if not found:
        return []
    norms = torch._foreach_norm(found, dtype=torch.float32 if found[0].device.type == "mps" else torch.float64)
    # All norms are read at once, because on a GPU each read waits for everything that was queued before it.
    return [norm**2 for norm in torch.stack(norms).tolist()]


def squared_norm_of_vector(vector: torch.Tensor) -> float:
    """The sum of squares of a large tensor on the CPU, of any shape. Not finite if some element is not.

    Computed in float32 within rows of 4096, and in float64 over the rows: 20 times as fast as all in float64.
    """
    vector_N = vector.reshape(-1)
    end = vector_N.numel() // 4096 * 4096
    norms = torch.linalg.vector_norm(vector_N[:end].view(-1, 4096), dim=1)
    return float(norms.double().square().sum()) + float(torch.linalg.vector_norm(vector_N[end:])) ** 2


# -- the factor of losses in float16 -----------------------------------------------------------------------------------


class LossScale:
    def __init__(self, first: float = 1.0, *, least: float = 1.0, largest: float = math.inf) -> None:
        """`least` and `largest` are the factor's bounds. Where all three are 1, which is for types other than float16,
        the factor stays 1."""
        self._least, self._largest = least, largest
        self.factor = self._last_good = first
        self._num_good = 0

    @classmethod
    def of_sums(cls, autocast: str, num_targets: int) -> "LossScale":
        """A scale for losses that are summed over about this many targets."""
        if autocast != "fp16":
            return cls(largest=1.0)
        first = 2.0 ** math.floor(math.log2(MEAN_SCALE / num_targets))
        return cls(first, least=first / 2**MOST_DOUBLINGS, largest=first * 2**MOST_DOUBLINGS)

    @classmethod
    def of_means(cls, autocast: str) -> "LossScale":
        return cls(MEAN_SCALE) if autocast == "fp16" else cls(largest=1.0)

    @property
    def is_fixed(self) -> bool:
        return self._least == self._largest

    def succeeded(self) -> None:
        self._last_good = self.factor
        self._num_good += 1
        if self._num_good % GROWS_AFTER == 0:
            self.factor = min(2 * self.factor, self._largest)

    def halve(self) -> bool:
        """Halve the factor, because gradients were not finite. Return False if no factor helps.

        Then the factor is again what it was before, since the gradients were at fault and not the factor.
        """
        self._num_good = 0
        if self.factor <= self._least:
            self.factor = self._last_good
            return False
        self.factor /= 2
        return True


def read_back(loss: torch.Tensor | None, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Bring the loss to the CPU, or 0 if there is none, and find whether all gradients are finite. Waits for the device
    once, or not at all if there is nothing to read."""
    read = [] if loss is None else [loss.detach().float()]
    if gradients:
        read += torch._foreach_norm(list(gradients))
    numbers = torch.stack(read).cpu() if read else torch.zeros(1)
    return torch.zeros(()) if loss is None else numbers[0], bool(numbers[loss is not None :].isfinite().all())
