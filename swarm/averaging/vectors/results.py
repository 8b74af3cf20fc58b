"""A committed round, in the form in which members keep it and send it to a member that missed it."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.shares import most_samples
from swarm.averaging.vectors.snapshots import TensorBytes, allocate, describe
from swarm.averaging.vectors.terms import LARGEST_CONTRIBUTION
from swarm.config import RunConfig
from swarm.errors import IntegrityError, MalformedMessage
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundResult, Tensors, known
from swarm.types import Block


@dataclass(frozen=True, kw_only=True, eq=False)
class Committed:
    """Everything that another member needs to commit the round.

    Attributes:
        before: where a member must stand to commit the round.
        after: where the member stands after the commit.
        result: the averaged tensors, to which nothing writes any more, and the figures of their round.
        state_digest: the digest that `apply` gave; computing it may take a while.
        amendments: all that the member knew at that time.
    """

    before: Standing
    after: Standing
    result: RoundResult
    outcome: pb.Outcome
    state_digest: asyncio.Future[str]
    amendments: tuple[str, ...] = ()

    @cached_property
    def content(self) -> TensorBytes:
        """The averaged tensors, as they are sent."""
        return TensorBytes(self.result.tensors.values())


async def pack(committed: Committed) -> pb.ResultHeader:
    """Make the header that announces a result on the wire, once the state's digest is known. The tensors' bytes follow
    it. It lacks the donor's round."""
    content = committed.content
    sha256 = await asyncio.to_thread(content.sha256, 0, content.num_bytes)
    state_digest = await asyncio.shield(committed.state_digest)
    return pb.ResultHeader(
        outcome=committed.outcome, standing=messages.pack_standing(committed.after), state_digest=state_digest,
        tensors=describe(committed.result.tensors), sha256=sha256, amendments=committed.amendments,
    )  # fmt: skip


def _unpack(before: Standing, header: pb.ResultHeader, tensors: Mapping[str, torch.Tensor]) -> Committed:
    """Read the wire form. The cost of the round stays zero, because this peer took no part in it. Raises
    MalformedMessage if the result does not follow from `before`, names no attempt, or was clipped by an impossible
    norm."""
    outcome, prepared = header.outcome, header.outcome.prepared
    after, members = messages.unpack_standing(header.standing), tuple(prepared.member_ids)
    lineage = messages.lineage_after(before.lineage, outcome)
    expected = Standing(round=before.round + 1, run_samples=before.run_samples + prepared.num_samples, lineage=lineage)
    if outcome.round != before.round or after != expected:
        raise MalformedMessage(f"a result of round {outcome.round} does not follow from round {before.round} here")
    require_norms(outcome, prepared.squared_norm)
    result = RoundResult(
        round=before.round, tensors=tensors, num_samples=prepared.num_samples, squared_norm=prepared.squared_norm,
        total_squared_norm=outcome.total_squared_norm, members=members, lineage=lineage,
        attempts=messages.require_ballot(prepared.ballot).attempt, digest=prepared.digest,
        partners=messages.digests_of(outcome.partners), amended=prepared.amended, given=messages.unpack_given(prepared),
    )  # fmt: skip
    return Committed(
        before=before, after=after, result=result, outcome=outcome, state_digest=known(header.state_digest),
        amendments=tuple(header.amendments),
    )  # fmt: skip


def require_norms(outcome: pb.Outcome, squared_norm: float) -> None:
    """Raise MalformedMessage unless the norm by which a round is clipped can be the norm of a model with this stage."""
    # In a gather the norm may differ in the last bits between kinds of processors.
    if not 0.0 <= squared_norm * 0.999 <= outcome.total_squared_norm < math.inf:
        raise MalformedMessage(
            f"the model's squared norm is said to be {outcome.total_squared_norm:g} in round {outcome.round}, where "
            f"this stage's is {squared_norm:g}"
        )


def require_counts(result: RoundResult, config: RunConfig, block: Block) -> None:
    """Raise IntegrityError for a round of more samples than its members can have given, or of others than it has."""
    most = most_samples(config, block) * (1 if config.rounds.synchronous else len(result.members))
    least = most if config.rounds.synchronous else 0
    if not least <= result.num_samples <= most:
        raise IntegrityError(
            f"the result of round {result.round} counts {result.num_samples} samples, not up to {most}"
        )


def require_applicable(result: RoundResult, contribution: Tensors) -> None:
    """Raise IntegrityError unless another peer's result can be an average of contributions like this one. Blocks.

    The result must have the contribution's names and shapes. Its numbers must be float32, finite, and within
    LARGEST_CONTRIBUTION, as those of each contribution.
    """
    expected = {name: tensor.shape for name, tensor in contribution.items()}
    if {name: tensor.shape for name, tensor in result.tensors.items()} != expected:
        raise IntegrityError(f"the result of round {result.round} does not fit this stage")
    for name, tensor in result.tensors.items():
        is_bounded = tensor.dtype is torch.float32 and (
            tensor.numel() == 0 or all(abs(float(extreme)) <= LARGEST_CONTRIBUTION for extreme in torch.aminmax(tensor))
        )
        if not is_bounded:
            raise IntegrityError(
                f"the result of round {result.round} holds NaN, infinity, numbers beyond {LARGEST_CONTRIBUTION:.0e}, "
                f"or none in float32, in {name}"
            )


class IncomingResult:
    def __init__(self, before: Standing, header: pb.ResultHeader, max_bytes: int) -> None:
        """Raises MalformedMessage for a header that makes no sense."""
        self.header = header
        self.committed = _unpack(before, header, allocate(header.tensors, max_bytes))
        self._content = self.committed.content
        self._num_filled = 0

    @property
    def is_whole(self) -> bool:
        return self._num_filled == self._content.num_bytes

    def feed(self, data: bytes) -> None:
        """Take the next piece. Raises MalformedMessage if there are more bytes than announced."""
        if not 0 < len(data) <= self._content.num_bytes - self._num_filled:
            raise MalformedMessage(f"a result does not come in {self._content.num_bytes} bytes")
        self._content.write(self._num_filled, data)
        self._num_filled += len(data)

    def sha256(self) -> bytes:
        return self._content.sha256(0, self._content.num_bytes)
