"""A member's duties: what it does when a leader says begin, average, commit or abort.

Used by averaging/averager; the leader is a participant as well. Joins the pure group state to the stage and
to the exchange. Applies nothing but committed results, each once. Never decides anything about a round.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from swarm.averaging import messages
from swarm.averaging.allreduce import (
    Average,
    MemberFailed,
    ReducedPart,
    Reduction,
    Weight,
    all_reduce,
    flatten,
    shares_digest,
    split,
    unflatten,
)
from swarm.averaging.group import Ballot, Group, Refused
from swarm.averaging.transport import Transport, record_of
from swarm.clock import Clock
from swarm.compression.codec import Buffer, Codec
from swarm.errors import IntegrityError, MalformedMessage
from swarm.rounds import Contribution, RoundMember, RoundResult, Snapshot, next_lineage
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.rpc.wire import require_finite
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

KEPT_OUTCOMES = 4
"""Committed rounds that a peer can still answer for."""

Spawn = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """What belongs to the attempt for which this member is closed."""

    ballot: Ballot
    contribution: Contribution
    began_at: float
    reduction: "asyncio.Future[Reduction]"
    """Comes with Average; others may be quicker than the leader's call."""


class Participant:
    """One member of one stage's group."""

    def __init__(
        self, *, own_id: PeerId, address: Address, member: RoundMember, codec: Codec, transport: Transport,
        clock: Clock, spawn: Spawn, moved: Callable[[], None],
    ) -> None:  # fmt: skip
        """
        Args:
            spawn: starts a task that outlives the call that asked for it.
            moved: called when `standing` has changed.
        """
        self._own_id = own_id
        self._address = address
        self._member = member
        self._codec = codec
        self._transport = transport
        self._clock = clock
        self._spawn = spawn
        self._moved = moved
        self._lock = asyncio.Lock()
        """Held by whatever calls the stage."""
        self._attempt: _Attempt | None = None
        self._scope: asyncio.Timeout | None = None
        """The exchange under way; expiring it ends it."""
        self._result: RoundResult | None = None
        self._result_began_at = 0.0
        self._state_digest = ""
        self.prepared: pb.Prepared | None = None
        self.standing = messages.standing_of(member.progress())
        """Where this member is; changes together with what it can answer about the round before."""
        self.group = Group(self.standing.round)
        self.outcomes: dict[int, pb.Outcome] = {}
        """How the last rounds were committed."""

    @property
    def contribution_bytes(self) -> int:
        """Size in float32 of what this member is closed with; 0 while it trains."""
        tensors = self._attempt.contribution.tensors.values() if self._attempt else ()
        return 4 * sum(tensor.numel() for tensor in tensors)

    # -- first phase -------------------------------------------------------------------------------------------------

    async def begin(self, request: pb.BeginRequest) -> pb.BeginReply:
        """Promise the attempt and close the contribution."""
        ballot = messages.require_ballot(request.ballot)
        async with self._lock:
            try:
                if messages.unpack_standing(request.standing) != self.standing:
                    raise Refused(f"this member is at round {self.group.round}, or on another branch")
                self.group.begin(request.standing.round, ballot)
            except Refused as refused:
                return pb.BeginReply(refusal=self._refusal(refused))
            self._end_exchange(f"attempt {ballot.attempt} of {ballot.leader_id} began")
            contribution = await self._member.close(self.group.round, drop=messages.unpack_indices(request.drop_gaps))
            self._attempt = _Attempt(
                ballot=ballot, contribution=contribution, began_at=self._clock.monotonic(),
                reduction=asyncio.get_running_loop().create_future(),
            )  # fmt: skip
            return pb.BeginReply(
                num_samples=contribution.num_samples, committed_gaps=messages.pack_indices(contribution.committed),
                prepared=self.prepared if self.group.prepared else None, since=messages.pack_ballot(self.group.since),
            )  # fmt: skip

    async def average(self, request: pb.AverageRequest) -> pb.AverageReply:
        """Exchange with the other members and keep the result. Ended by an abort, a doubt, or a newer attempt."""
        ballot = messages.require_ballot(request.ballot)
        weights = [Weight(peer_id=share.contact.peer_id, num_samples=share.num_samples) for share in request.shares]
        try:
            async with self._lock:
                attempt = self._join(request, ballot, weights)
            average = await self._exchange(request, attempt, weights)
            async with self._lock:
                self.group.prepare(request.round, ballot, average.digest)
                self._keep(average, attempt, [weight.peer_id for weight in weights])
        except Refused as refused:
            return pb.AverageReply(refusal=self._refusal(refused))
        except MemberFailed as failed:
            return pb.AverageReply(failure=pb.Failure(blamed_id=failed.peer_id, reason=str(failed)))
        return pb.AverageReply(prepared=self.prepared)

    def _join(self, request: pb.AverageRequest, ballot: Ballot, weights: list[Weight]) -> _Attempt:
        attempt = self._attempt
        own = [weight.num_samples for weight in weights if weight.peer_id == self._own_id]
        if attempt is None or attempt.ballot != ballot or own != [attempt.contribution.num_samples]:
            raise Refused("the shares do not name this member's contribution")
        self.group.join(request.round, ballot, shares_digest(weights, self._codec))
        index = [weight.peer_id for weight in weights].index(self._own_id)
        num_elements = sum(tensor.numel() for tensor in attempt.contribution.tensors.values())
        part = split(num_elements, len(weights))[index]
        reduction = Reduction(weights=weights, num_elements=part.stop - part.start, codec=self._codec)
        attempt.reduction.set_result(reduction)
        return attempt

    async def _exchange(self, request: pb.AverageRequest, attempt: _Attempt, weights: list[Weight]) -> Average:
        vector_D = await asyncio.to_thread(flatten, attempt.contribution.tensors)
        reduction = attempt.reduction.result()
        try:
            await asyncio.to_thread(require_finite, "contribution", vector_D)
        except MalformedMessage as error:
            failed = MemberFailed(self._own_id, str(error))
            reduction.fail(failed)
            raise failed from None
        opening = pb.ExchangeOpen(
            address=self._address, peer_id=self._own_id, round=request.round, ballot=request.ballot,
            shares_digest=self.group.shares_digest,
        )  # fmt: skip
        owners = {share.contact.peer_id: record_of(share.contact, self._address.stage) for share in request.shares}
        try:
            async with asyncio.timeout(request.timeout_seconds) as scope:
                self._scope = scope
                return await all_reduce(
                    vector_D, own_id=self._own_id, weights=weights, reduction=reduction,
                    transport=_Owners(self._transport, owners, opening, request.timeout_seconds),
                    timeout_seconds=request.timeout_seconds,
                )  # fmt: skip
        except TimeoutError:
            raise Refused(f"attempt {request.ballot.attempt} was given up, or took too long") from None
        finally:
            if self._scope is scope:
                self._scope = None

    def _keep(self, average: Average, attempt: _Attempt, member_ids: list[str]) -> None:
        self.prepared = pb.Prepared(
            ballot=messages.pack_ballot(attempt.ballot), digest=average.digest, squared_norm=average.squared_norm,
            member_ids=member_ids, num_samples=average.num_samples,
        )  # fmt: skip
        standing = self.standing
        self._result_began_at = attempt.began_at
        self._result = RoundResult(
            round=standing.round, tensors=unflatten(average.vector_D, attempt.contribution.tensors),
            num_samples=average.num_samples, squared_norm=average.squared_norm,
            total_squared_norm=average.squared_norm, members=tuple(member_ids),
            lineage=next_lineage(standing.lineage, standing.round, average.digest, member_ids),
            attempts=attempt.ballot.attempt, bytes_sent=average.bytes_sent, bytes_received=average.bytes_received,
            compression_ratio=average.compression_ratio, seconds=0.0, digest=average.digest,
        )  # fmt: skip

    async def exchange(self, opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> ReducedPart:
        """Take another member's part and answer with the average, as the owner.

        Raises:
            Refused: not this attempt, or not these members.
            MemberFailed: there will be no average.
            MalformedMessage: more bytes than the part has.
        """
        attempt = self._attempt
        if attempt is None or self.group.active is None or attempt.ballot != messages.unpack_ballot(opening.ballot):
            raise Refused(f"attempt {opening.ballot.attempt} of {opening.ballot.leader_id} is not under way here")
        reduction = await asyncio.shield(attempt.reduction)
        if opening.shares_digest != self.group.shares_digest:
            raise Refused("the member lists differ")
        expected = reduction.num_bytes_from(opening.peer_id)
        received = bytearray()
        async for piece in pieces:
            received += piece
            if len(received) > expected:
                raise MalformedMessage(f"a part of {expected} bytes is expected, {len(received)} came")
        if opening.peer_id in reduction.missing:
            await reduction.add(opening.peer_id, received)
        return await reduction.result()

    # -- second phase ------------------------------------------------------------------------------------------------

    async def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Apply the prepared result. Runs to its end even if the leader hangs up."""
        try:
            await self.apply(request.round, request.digest, request.total_squared_norm)
        except Refused as refused:
            return pb.CommitReply(refusal=self._refusal(refused))
        return pb.CommitReply(state_digest=self._state_digest)

    async def apply(self, round_number: int, digest: str, total_squared_norm: float) -> None:
        """Apply the prepared result, once. Raises Refused if it is not the prepared one."""
        refused: Refused | None
        refused = await asyncio.shield(self._spawn(self._apply(round_number, digest, total_squared_norm)))
        if refused is not None:
            raise refused

    async def _apply(self, round_number: int, digest: str, total_squared_norm: float) -> Refused | None:
        async with self._lock:
            try:
                if not self.group.check_commit(round_number, digest):
                    return None
            except Refused as refused:
                return refused
            assert self._result is not None
            assert self.prepared is not None
            self._end_exchange("the round was committed")
            seconds = self._clock.monotonic() - self._result_began_at
            result = dataclasses.replace(self._result, total_squared_norm=total_squared_norm, seconds=seconds)
            self._state_digest = await self._member.apply(result)
            self.group.commit(round_number, digest)
            outcome = pb.Outcome(round=round_number, prepared=self.prepared, total_squared_norm=total_squared_norm)
            self._remember([outcome])
        return None

    async def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Give the attempt up, with what it prepared, and go on training."""
        ballot = messages.require_ballot(request.ballot)
        async with self._lock:
            try:
                was_active = self.group.active
                self.group.abort(request.round, ballot, void=request.void)
            except Refused as refused:
                return pb.AbortReply(refusal=self._refusal(refused))
            if was_active == ballot:
                await self._reopen(request.reason)
        return pb.AbortReply()

    async def step_back(self, reason: str) -> None:
        """In doubt about the leader: go on training, but keep what is prepared for the next leader to find."""
        async with self._lock:
            if self.group.active is not None:
                self.group.step_back()
                await self._reopen(reason)

    async def install(self, snapshot: Snapshot, outcomes: list[pb.Outcome]) -> None:
        """Become a downloaded state. Runs to its end even if the caller is cancelled.

        Raises:
            IntegrityError: it does not fit this stage.
        """
        unfit: IntegrityError | None = await asyncio.shield(self._spawn(self._install(snapshot, outcomes)))
        if unfit is not None:
            raise unfit

    async def _install(self, snapshot: Snapshot, outcomes: list[pb.Outcome]) -> IntegrityError | None:
        async with self._lock:
            self._end_exchange("a newer state was downloaded")
            try:
                await self._member.install(snapshot)
            except IntegrityError as unfit:
                return unfit
            self.group.install(snapshot.round)
            self.outcomes.clear()
            self._remember(outcomes)
        return None

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _remember(self, outcomes: list[pb.Outcome]) -> None:
        self.outcomes |= {outcome.round: outcome for outcome in outcomes}
        for round_number in sorted(self.outcomes)[:-KEPT_OUTCOMES]:
            del self.outcomes[round_number]
        self._attempt = self._result = self.prepared = None
        self.standing = messages.standing_of(self._member.progress())
        self._moved()

    async def _reopen(self, reason: str) -> None:
        self._end_exchange(reason)
        self._attempt = None
        if self.group.prepared is None:
            self._result = self.prepared = None
        await self._member.reopen(self.group.round)

    def _end_exchange(self, reason: str) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())
        self._scope = None
        if self._attempt is not None and not self._attempt.reduction.done():
            self._attempt.reduction.set_exception(Refused(reason))
            self._attempt.reduction.exception()  # Retrieved: it may be that nobody waits.

    def _refusal(self, refused: Refused) -> pb.Refusal:
        return pb.Refusal(
            reason=str(refused), promised=messages.pack_ballot(self.group.promised), round=self.group.round
        )


@dataclass(frozen=True)
class _Owners:
    """The other members, as owners of parts."""

    transport: Transport
    records: dict[str, PeerRecord]
    opening: pb.ExchangeOpen
    timeout_seconds: float

    async def exchange(self, owner_id: str, part: Buffer, reply_bytes: int) -> ReducedPart:
        return await self.transport.exchange(
            self.records[owner_id], self.opening, part, reply_bytes=reply_bytes, timeout_seconds=self.timeout_seconds
        )
