"""Error feedback: what encoding dropped from this member's contributions, to be added to later ones.

Used by averaging/participant. As in SparseLoCo (arXiv 2508.15706) the residual e of a contribution c that was
encoded to C(decay * e + c) is decay * e + c - C(decay * e + c). It is transactional: an exchange only stages the new
residual, and the commit of that very exchange makes it real, so an attempt that comes to nothing loses nothing.

The owner of a part encodes the sum again. What that drops is kept likewise, and added to the next sum over the same
elements.

Shapes: D elements of the vector, P of a part.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What one exchange dropped.

    Attributes:
        contribution_D: of this member's contribution; None if it sent none.
        part: the part that this member owned.
        sum_P: of the sum there; None if nothing was encoded again.
    """

    contribution_D: torch.Tensor | None
    part: slice
    sum_P: torch.Tensor | None


class ErrorFeedback:
    """The residual of one vector, from round to round.

    Args:
        decay: share that is kept each round.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._contribution_D: torch.Tensor | None = None
        self._part = slice(0, 0)
        self._sum_P: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that the residual takes."""
        return sum(tensor.nbytes for tensor in (self._contribution_D, self._sum_P) if tensor is not None)

    def compensate(self, contribution_D: torch.Tensor) -> torch.Tensor:
        """The contribution with what earlier rounds owe; may be the same tensor, never writes to it."""
        if self._contribution_D is None:
            return contribution_D
        return torch.add(contribution_D, self._contribution_D, alpha=self._decay)

    def owed(self, part: slice) -> torch.Tensor | None:
        """What earlier sums over a part's elements owe, shape (P,)."""
        start, end = max(part.start, self._part.start), min(part.stop, self._part.stop)
        if self._sum_P is None or start >= end:
            return None
        owed_P = torch.zeros(part.stop - part.start)
        owed_P[start - part.start : end - part.start] = self._sum_P[start - self._part.start : end - self._part.start]
        return owed_P.mul_(self._decay)

    def commit(self, residual: Residual) -> None:
        """The exchange that left this residual was committed."""
        if residual.contribution_D is not None:
            self._contribution_D = residual.contribution_D
        self._part, self._sum_P = residual.part, residual.sum_P
