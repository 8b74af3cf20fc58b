"""The factor by which losses are multiplied for a backward in float16, so that gradients neither vanish nor overflow.

The factor is a power of two, so multiplying by it and dividing by it round nothing. What overflows is computed again
with half the factor. (Micikevicius et al., arXiv 1710.03740, skip such a step, and so take fewer steps than with other
types.)
"""

import math

MEAN_SCALE = 2.0**16
"""The first factor for mean losses; torch.amp.GradScaler has the same one."""
GROWS_AFTER = 2000
"""After how many successes in a row the factor is doubled, as in torch.amp.GradScaler."""
MOST_DOUBLINGS = 8
"""A stage's factor leaves its first value by so many doublings or halvings at the most. At its lowest, gradients keep
about as many digits as bfloat16 has, so what a neighbour sends can spoil no gradients but its own."""


class LossScale:
    """The present factor, which learns from what overflows."""

    def __init__(self, first: float = 1.0, *, least: float = 1.0, largest: float = math.inf) -> None:
        """
        Args:
            least, largest: the factor's bounds. Where all three are 1, which is for types other than float16, the
                factor stays 1.
        """
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
        """Note that gradients with this factor were finite."""
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
