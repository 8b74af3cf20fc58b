"""Error feedback: what encoding dropped from this member's contributions, to be added to later ones.

As in SparseLoCo (arXiv 2508.15706) the residual e of a contribution c that was encoded to
C(decay * e + c) is decay * e + c - C(decay * e + c). It is transactional: an exchange only returns the new residual,
which is taken over when that exchange is committed. So an attempt that fails loses nothing.

The owner of a part encodes the sum again. What this encoding drops is kept as well: it is a debt to the next sum over
the same elements. Sometimes this member does not make that sum, because parts move, and in a gather no member makes
one. Then this member adds the debt to its contribution, divided by the weight with which the contribution will be
multiplied. What encoding drops of those elements, times that weight, remains a debt to sums. It must not become a
residual of the contribution: then the weight of another round would multiply it, and it could count several times when
members come and go.

Shapes: D elements of the vector, P of a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Owed:
    """A debt to sums: what was dropped when sums over a part's elements were encoded."""

    part: slice
    sum_P: torch.Tensor

    def within(self, start: int, stop: int) -> "Owed | None":
        """The debt for the elements from `start` to `stop` alone; None if there is none. Shares memory."""
        start, stop = max(start, self.part.start), min(stop, self.part.stop)
        if start >= stop:
            return None
        return Owed(slice(start, stop), self.sum_P[start - self.part.start : stop - self.part.start])

    def outside(self, part: slice) -> "list[Owed]":
        if self.within(part.start, part.stop) is None:
            return [self]
        rests = (self.within(self.part.start, part.start), self.within(part.stop, self.part.stop))
        # Copies: views would keep the whole tensor in memory.
        return [Owed(rest.part, rest.sum_P.clone()) for rest in rests if rest is not None]


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The residual of one exchange: everything that encoding dropped.

    Attributes:
        contribution_D: what was dropped of this member's contribution; None if it sent none.
        owed: what was dropped of the sum over the part that this member owned, and debts of earlier rounds to sums over
            other elements; no element is in two of them.
    """

    contribution_D: torch.Tensor | None
    owed: Sequence[Owed] = ()


class ErrorFeedback:
    """The residual of one vector, from round to round. `decay` is the share of the residual that is kept each round."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._contribution_D: torch.Tensor | None = None
        self._sums: Sequence[Owed] = ()

    @property
    def num_bytes(self) -> int:
        own_bytes = 0 if self._contribution_D is None else self._contribution_D.nbytes
        return own_bytes + sum(owed.sum_P.nbytes for owed in self._sums)

    def compensate(self, contribution_D: torch.Tensor) -> torch.Tensor:
        """Add the residual of earlier rounds to a contribution. May return the same tensor, and never writes to it."""
        if self._contribution_D is None:
            return contribution_D
        return torch.add(contribution_D, self._contribution_D, alpha=self._decay)

    def owed(self, part: slice) -> torch.Tensor | None:
        """The debt to the next sum over a part, shape (P,); None if there is none."""
        sums = [owed for owed in (known.within(part.start, part.stop) for known in self._sums) if owed is not None]
        if not sums:
            return None
        owed_P = torch.zeros(part.stop - part.start)
        for owed in sums:
            owed_P[owed.part.start - part.start : owed.part.stop - part.start] = owed.sum_P
        return owed_P.mul_(self._decay)

    def elsewhere(self, part: slice) -> list[Owed]:
        """The debts for elements outside of a part, without decay."""
        return [rest for owed in self._sums for rest in owed.outside(part)]

    def carry(self, vector_D: torch.Tensor, elsewhere: Sequence[Owed], weight: float) -> torch.Tensor:
        """Return a copy of a contribution with the debts to sums that this member does not make added. `weight` is the
        contribution's weight in the sum."""
        vector_D = vector_D.clone()
        for owed in elsewhere:
            vector_D[owed.part].add_(owed.sum_P, alpha=self._decay / weight)
        return vector_D

    @staticmethod
    def still_owed(residual_D: torch.Tensor, elsewhere: Sequence[Owed], weight: float) -> list[Owed]:
        """Return the part of a contribution's residual that remains a debt to sums, and set the residual to 0 there."""
        still = [Owed(owed.part, residual_D[owed.part] * weight) for owed in elsewhere]
        for owed in elsewhere:
            residual_D[owed.part] = 0.0
        return still

    def commit(self, residual: Residual) -> None:
        if residual.contribution_D is not None:
            self._contribution_D = residual.contribution_D
        self._sums = residual.owed
