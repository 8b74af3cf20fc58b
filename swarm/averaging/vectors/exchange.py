"""One member's exchanges: it flattens the contribution, exchanges it, and keeps the error feedback.

Shapes: D elements of the vector.
"""

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares
from swarm.averaging.vectors.allreduce import Butterfly, HandOut, Reduction, gather
from swarm.averaging.vectors.scrutiny import Scrutiny
from swarm.averaging.vectors.terms import AllReduceTransport, Average, Compare, Terms, no_deviations, sent_bytes
from swarm.compression import buffers
from swarm.compression.codec import contribution_codec, result_codec
from swarm.compression.feedback import ErrorFeedback, Owed, Residual
from swarm.config import AveragingConfig
from swarm.events import Events
from swarm.machine.memory import Recycler
from swarm.training.round_member import Contribution
from swarm.training.scaling import squared_norm_of_vector
from swarm.training.sketches import Stated
from swarm.training.tally import Given

Side = Reduction | HandOut
"""One member's side of an exchange, as the others see it."""
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


class Closing:
    """A contribution that is being frozen, or is frozen, for any attempt that needs it.

    For a stage of several GB, or on a machine whose tasks take ten seconds, freezing takes longer than a call may. So
    it goes on after the call that started it, and the next call joins it.

    Attributes:
        drop: microbatches that are taken out of the contribution.
        amended: the digest of the newest amendment that is in force.
        exchanges: make it ready and exchange it, with the codec of that configuration.
        began_at: when freezing began, by the member's clock.
    """

    def __init__(self, drop: frozenset[int], amended: str, exchanges: "Exchanges", *, began_at: float) -> None:
        self.drop = drop
        self.amended = amended
        self.exchanges = exchanges
        self.began_at = began_at
        self._outcome: asyncio.Future[Closed | Exception] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether freezing has ended, with a contribution or with an error."""
        return self._outcome.done()

    def end(self, outcome: Closed | Exception) -> None:
        self._outcome.set_result(outcome)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until freezing is over, but no longer than `seconds`. Returns whether it is."""
        await asyncio.wait([self._outcome], timeout=seconds)
        return self.is_over

    @property
    def closed(self) -> Closed:
        """The frozen contribution, once freezing is over. Raises the error of freezing it."""
        outcome = self._outcome.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Exchanges:
    """What a member keeps from one exchange to the next."""

    def __init__(
        self, config: AveragingConfig, own_id: str, scrutiny: Scrutiny | None = None, bytes_per_second: float = 0.0
    ) -> None:
        self.codec = contribution_codec(config)
        self.result_codec = result_codec(config)
        self.bytes_per_second = bytes_per_second
        """The rate at which this member's line sends, as measured; 0 before that."""
        is_tiled = self.codec.tile == buffers.TILE
        self._flatten = buffers.flatten if is_tiled else buffers.concatenate
        self.unflatten = buffers.unflatten if is_tiled else buffers.cut
        """Cuts an averaged vector into tensors, given tensors with the same names and shapes."""
        self._config = config
        self._own_id = own_id
        self.feedback: dict[int, ErrorFeedback] = {}
        """The error feedback of each fragment."""
        self._scrutiny = scrutiny or Scrutiny(own_id)
        self.suspects = self._scrutiny.suspects
        self._last: Closed | None = None
        self._memory = Recycler()

    def under(self, config: AveragingConfig) -> "Exchanges":
        """These exchanges themselves, or new ones if the settings have been amended. The residual stays behind, because
        it is in the former codec's order of elements."""
        if config == self._config:
            return self
        return Exchanges(config, self._own_id, self._scrutiny, self.bytes_per_second)

    @property
    def residual_bytes(self) -> int:
        return sum(feedback.num_bytes for feedback in self.feedback.values())

    async def flatten(self, contribution: Contribution) -> Closed:
        """Make a contribution ready for exchange. The same contribution gives the same vector in every attempt."""
        if self._last is None or self._last.contribution is not contribution:
            self._last = await asyncio.to_thread(self._closed, contribution)
        return self._last

    def _closed(self, contribution: Contribution) -> Closed:
        num_elements = sum(tensor.numel() for tensor in contribution.tensors.values())
        vector_D = self._flatten(contribution.tensors, self._memory.vector(num_elements))
        if contribution.num_samples and contribution.fragment in self.feedback:
            vector_D = self.feedback[contribution.fragment].compensate(vector_D)
        return Closed(contribution=contribution, vector_D=vector_D, norm=squared_norm_of_vector(vector_D) ** 0.5)

    def open(self, closed: Closed, shares: Shares) -> Side:
        """Make this member's side of an exchange, which answers the other members."""
        gathers = _gathers(shares, self._config)
        compare: Compare = no_deviations
        if self._is_own(closed):
            compare = self._scrutiny.comparing(closed.contribution, shares, self.codec, gathers=gathers)
        if gathers:
            return HandOut(shares, compare)
        own_part, feedback = self._own_part(shares), self.feedback.get(closed.contribution.fragment)
        return Reduction(
            shares, self._own_id, codec=self.codec, result_codec=self.result_codec,
            owed=(lambda: feedback.owed(own_part)) if feedback else lambda: None, compare=compare,
        )  # fmt: skip

    def require_in_line(
        self, closed: Closed, round_number: int, shares: Shares, average: Average, events: Events
    ) -> None:
        """Raise MemberFailed if owners find a member's contribution out of line again and again."""
        if self._is_own(closed):
            gathers = _gathers(shares, self._config)
            self._scrutiny.require_in_line(round_number, shares, average, events, gathers=gathers)

    def stated(self, closed: Closed, shares: Shares) -> Mapping[str, Stated]:
        """What this member states of its contribution, to the owner of each part."""
        return self._scrutiny.stated(closed.contribution, shares, self.codec) if self._is_own(closed) else {}

    def _is_own(self, closed: Closed) -> bool:
        """Whether that is this member's own contribution, and not its group's, for which nobody could be blamed."""
        return closed is self._last

    async def run(
        self, closed: Closed, shares: Shares, side: Side, transport: AllReduceTransport, timeout_seconds: float
    ) -> tuple[Average, float]:
        """Exchange with the other members. Returns the average and the seconds that this took; raises like
        `Butterfly.run`."""
        started_at = time.perf_counter()
        try:
            # Not done in `flatten`, because this member's weight was not known then.
            vector_D, elsewhere = await asyncio.to_thread(self._carry, closed, shares)
        except BaseException:
            # Other members may already be waiting for this member's part.
            side.fail(MemberFailed(self._own_id, "the exchange was given up", noticed_by=self._own_id))
            raise
        terms = Terms(
            own_id=self._own_id, shares=shares, codec=self.codec, result_codec=self.result_codec, transport=transport,
            timeout_seconds=timeout_seconds,
        )  # fmt: skip
        if isinstance(side, HandOut):
            average = await gather(vector_D, side, terms)
        else:
            average = await Butterfly(vector_D, side, terms, self._memory).run()
            own_D = closed.vector_D if self._is_own(closed) else None
            await self._scrutiny.look_at_sums(own_D, average, shares, self.codec)
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
        return dataclasses.replace(residual, owed=[*elsewhere, *residual.owed])

    def _carries(self, shares: Shares) -> bool:
        own = shares.of(self._own_id)
        return own.contributes and own.weight * len(shares.senders) >= LEAST_WEIGHT

    def committed(self, fragment: int, residual: Residual) -> None:
        self._last = None
        self._scrutiny.committed(fragment)
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
        return slice(0, 0) if _gathers(shares, self._config) else shares.part_of[self._own_id]


def _gathers(shares: Shares, config: AveragingConfig) -> bool:
    is_small = len(shares.members) <= config.gather_members
    return contribution_codec(config).is_sparse and is_small and not shares.has_one_owner


def given_after(before: Mapping[str, Given], shares: Shares, config: AveragingConfig) -> dict[str, Given]:
    """What members have given by the end of an exchange: what is in their contributions, which is known `before` if
    these are averages of groups, and the bytes that they have sent."""
    codecs, gathers, given = (contribution_codec(config), result_codec(config)), _gathers(shares, config), dict(before)
    for share in shares.members:
        counts, sent = share.counts, sent_bytes(shares, share, *codecs, gathers=gathers)
        targets = counts.num_targets * counts.round_samples // max(1, counts.num_samples)
        own = Given(counts.round_samples, targets, 0, 1)
        given[share.peer_id] = before.get(share.peer_id, own).plus(Given(num_bytes=sent))
    return given
