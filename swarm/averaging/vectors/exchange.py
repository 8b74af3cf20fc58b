"""One member's exchanges: it closes the contribution, exchanges it, and keeps the error feedback.

Shapes: D elements of the vector.
"""

import asyncio
import dataclasses
import time
from dataclasses import dataclass

import torch

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares
from swarm.averaging.vectors.allreduce import AllReduceTransport, Average, Terms, butterfly, gather
from swarm.averaging.vectors.feedback import ErrorFeedback, Owed, Residual
from swarm.averaging.vectors.reduction import HandOut, Reduction, Side
from swarm.compression import buffers
from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import AveragingConfig
from swarm.machine.memory import Recycler
from swarm.training.clipping import squared_norm_of_vector
from swarm.training.round_member import Contribution

SMOOTHING = 0.3
"""Weight of the newest measurement of this member's line."""
LEAST_WEIGHT = 0.01
"""A share of the mean weight. A contribution whose weight is below it carries no debt to sums (see feedback): the debt
is divided by the weight, and would then be nearly all that is sent, or out of range."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Closed:
    """A contribution as it will be exchanged.

    Attributes:
        vector_D: the contribution plus the residual of earlier rounds.
        norm: of the vector; not finite if some element is not.
    """

    contribution: Contribution
    vector_D: torch.Tensor
    norm: float


class Exchanges:
    """What a member keeps from one exchange to the next."""

    def __init__(self, config: AveragingConfig, own_id: str) -> None:
        self.codec = contribution_codec(config)
        self.result_codec = result_codec(config)
        self.bytes_per_second = 0.0
        """The rate at which this member's line sends, as measured; 0 before that."""
        tiled = self.codec.tile == buffers.TILE
        self._flatten = buffers.flatten if tiled else buffers.concatenate
        self.unflatten = buffers.unflatten if tiled else buffers.cut
        """Cuts an averaged vector into tensors, given tensors with the same names and shapes."""
        self._config = config
        self._own_id = own_id
        self.feedback: dict[int, ErrorFeedback] = {}
        """The error feedback of each fragment."""
        self._last: Closed | None = None
        self._memory = Recycler()

    @property
    def residual_bytes(self) -> int:
        return sum(feedback.num_bytes for feedback in self.feedback.values())

    async def close(self, contribution: Contribution) -> Closed:
        """Make a contribution ready for exchange. The same contribution gives the same vector in every attempt."""
        if self._last is None or self._last.contribution is not contribution:
            self._last = await asyncio.to_thread(self._close, contribution)
        return self._last

    def _close(self, contribution: Contribution) -> Closed:
        num_elements = sum(tensor.numel() for tensor in contribution.tensors.values())
        vector_D = self._flatten(contribution.tensors, self._memory.vector(num_elements))
        if contribution.num_samples and contribution.fragment in self.feedback:
            vector_D = self.feedback[contribution.fragment].compensate(vector_D)
        return Closed(contribution=contribution, vector_D=vector_D, norm=squared_norm_of_vector(vector_D) ** 0.5)

    def open(self, closed: Closed, shares: Shares) -> Side:
        """Make this member's side of an exchange, which answers the other members."""
        if self._gathers(shares):
            return HandOut(shares)
        own_part, feedback = self._own_part(shares), self.feedback.get(closed.contribution.fragment)
        return Reduction(
            shares,
            self._own_id,
            codec=self.codec,
            result_codec=self.result_codec,
            owed=(lambda: feedback.owed(own_part)) if feedback else lambda: None,
        )

    async def run(
        self, closed: Closed, shares: Shares, side: Side, transport: AllReduceTransport, timeout_seconds: float
    ) -> tuple[Average, float]:
        """Exchange with the other members. Returns the average and the seconds that this took; raises like
        `butterfly`."""
        started_at = time.perf_counter()
        try:
            # Not done in `close`, because this member's weight was not known then.
            vector_D, elsewhere = await asyncio.to_thread(self._carry, closed, shares)
        except BaseException:
            # Other members may already be waiting for this member's part.
            side.fail(MemberFailed(self._own_id, "the exchange was given up", noticed_by=self._own_id))
            raise
        terms = Terms(
            own_id=self._own_id,
            shares=shares,
            codec=self.codec,
            result_codec=self.result_codec,
            transport=transport,
            timeout_seconds=timeout_seconds,
        )
        if isinstance(side, HandOut):
            average = await gather(vector_D, side, terms)
        else:
            average = await butterfly(vector_D, side, terms, self._memory)
        if (rate := average.upload_bytes_per_second) > 0:
            self.bytes_per_second += (SMOOTHING if self.bytes_per_second else 1.0) * (rate - self.bytes_per_second)
        if elsewhere:
            residual = await asyncio.to_thread(self._settle, average.residual, shares, elsewhere)
            average = dataclasses.replace(average, residual=residual)
        return average, time.perf_counter() - started_at

    def _carry(self, closed: Closed, shares: Shares) -> tuple[torch.Tensor, list[Owed]]:
        """Return the contribution plus this member's debts to sums that it does not make now, and these debts
        themselves."""
        feedback = self.feedback.get(closed.contribution.fragment)
        elsewhere = feedback.elsewhere(self._own_part(shares)) if feedback else []
        if feedback is None or not elsewhere or not self._carries(shares):
            return closed.vector_D, elsewhere
        return feedback.carry(closed.vector_D, elsewhere, shares.of(self._own_id).weight), elsewhere

    def _settle(self, residual: Residual, shares: Shares, elsewhere: list[Owed]) -> Residual:
        """Divide a residual into the contribution's own part and debts to sums. Debts that the contribution did not
        carry stay as they are."""
        if residual.contribution_D is not None and self._carries(shares):
            weight = shares.of(self._own_id).weight
            elsewhere = ErrorFeedback.still_owed(residual.contribution_D, elsewhere, weight)
        return dataclasses.replace(residual, elsewhere=elsewhere)

    def _carries(self, shares: Shares) -> bool:
        own = shares.of(self._own_id)
        return own.contributes and own.weight * len(shares.senders) >= LEAST_WEIGHT

    def committed(self, fragment: int, residual: Residual) -> None:
        self._last = None
        if self.codec.needs_feedback and self._config.feedback_decay > 0:
            feedback = self.feedback.setdefault(fragment, ErrorFeedback(self._config.feedback_decay))
            feedback.commit(residual)

    def forget(self, fragment: int) -> None:
        """Drop a fragment's residual: an exchange was committed, but the new residual that it left here is lost."""
        self._last = None
        self.feedback.pop(fragment, None)

    def reset(self) -> None:
        """Forget all residuals: another state was installed, and they were about weights that this member no longer
        has."""
        self._last = None
        self.feedback.clear()

    def _own_part(self, shares: Shares) -> slice:
        """The part that this member sums for all; empty in a gather."""
        if self._gathers(shares):
            return slice(0, 0)
        return shares.parts[[share.peer_id for share in shares.members].index(self._own_id)]

    def _gathers(self, shares: Shares) -> bool:
        is_small = len(shares.members) <= self._config.gather_members
        return self.codec.is_sparse and is_small and not shares.has_one_owner
