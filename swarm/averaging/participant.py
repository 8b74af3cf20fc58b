"""A member's duties: how it answers a leader's Begin, Average, Commit and Abort.

The leader is a participant too. Keeps the pure group state consistent with this member's work (own_round) and with the
exchange. Never decides anything about a round.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swarm.averaging.advance import Advance
from swarm.averaging.agreement import messages
from swarm.averaging.agreement.group import Ballot, Refused
from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.place import Place
from swarm.averaging.agreement.shares import Counts, Shares, shares_of
from swarm.averaging.own_round import Attempt, OwnRound, Result
from swarm.averaging.roster import Roster
from swarm.averaging.vectors.allreduce import Average
from swarm.averaging.vectors.exchange import Closed
from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import ABORT, AVERAGE, BEGIN, COMMIT, Payload, record_of
from swarm.compression.codec import Buffer
from swarm.errors import PeerUnavailable, SwarmError
from swarm.events import Begin, Prepare
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundCost, RoundResult, Tensors
from swarm.types import PeerRecord


@dataclass(frozen=True, kw_only=True)
class OtherMembers:
    """The members with which one exchange is made."""

    context: Context
    records: Mapping[str, PeerRecord]
    opening: pb.ExchangeOpen
    timeout_seconds: float
    silence_seconds: float
    """How long a member may send nothing, if it need not wait for other members."""

    async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
        peer = self.records[peer_id]
        silence: list[str] = []

        async def watch(scope: asyncio.Timeout) -> None:
            try:
                await self._watch(peer)
            except SwarmError as error:
                silence.append(str(error))
                scope.reschedule(asyncio.get_running_loop().time())

        try:
            # No task group: it would keep an exception that passes through it in a reference cycle, with all frames and
            # their vectors.
            async with asyncio.timeout(None) as scope:
                watching = asyncio.create_task(watch(scope))
                try:
                    return await self.context.transport.exchange(
                        peer,
                        self.opening,
                        part,
                        reply_bytes=reply_bytes,
                        timeout_seconds=self.timeout_seconds,
                        silence_seconds=None if waits else self.silence_seconds,
                    )
                finally:
                    watching.cancel()
                    del watching, scope  # They would make a reference cycle too.
        except TimeoutError:
            if not silence:
                raise
            raise PeerUnavailable(silence[0]) from None

    async def _watch(self, peer: PeerRecord) -> None:
        """Ping a member again and again. Raise SwarmError once it does not answer, long before the exchange's
        deadline."""
        timing = self.context.timing
        while True:
            await self.context.clock.sleep(timing.heartbeat_seconds)
            await self.context.transport.ping(peer, timeout_seconds=timing.report_seconds)


@dataclass(eq=False)
class Participant:
    """One member of one stage's group."""

    context: Context
    place: Place
    own_round: OwnRound
    advance: Advance
    shared: TiedParameters
    roster: Roster

    @property
    def answers(self) -> dict[str, Callable[[Any], Any]]:
        """The method that answers each call of a leader, by the call's name."""
        return {BEGIN.name: self.begin, AVERAGE.name: self.average, COMMIT.name: self.commit, ABORT.name: self.abort}

    # -- first phase -------------------------------------------------------------------------------------------------

    async def begin(self, request: pb.BeginRequest) -> pb.BeginReply:
        """Promise the attempt and close the contribution. If closing takes long, the answer reports its progress.

        Closing goes on if this call is cancelled. Raises MalformedMessage for another leader's attempt.
        """
        ballot = messages.own_ballot(request)
        clock = self.context.clock
        gives_up_at = clock.monotonic() + max(0.0, min(request.wait_seconds, self.context.timing.begin_seconds))
        try:
            async with asyncio.timeout(gives_up_at - clock.monotonic()):
                await self.place.lock.acquire()
        except TimeoutError:  # A commit may be waiting for the compute thread.
            return pb.BeginReply(closing=self.own_round.closing_report())
        try:
            try:
                if self.place.is_catching_up:
                    raise Refused("this member is catching up")
                if messages.unpack_standing(request.standing) != self.place.standing:
                    raise Refused(f"this member is at round {self.place.group.round}, or on another branch")
                self._require_follower(ballot)
                self.place.group.begin(request.standing.round, ballot)
            except Refused as refused:
                return pb.BeginReply(refusal=self._refusal(refused))
            self.own_round.end_exchange(f"attempt {ballot.attempt} of {ballot.leader_id} began")
            closing = self.own_round.close(frozenset(messages.unpack_indices(request.drop_gaps)))
        finally:
            self.place.lock.release()
        if not await closing.wait(max(0.0, gives_up_at - clock.monotonic())):
            return pb.BeginReply(closing=self.own_round.closing_report())
        # An error of freezing is raised before any refusal, because after a refusal the leader would try again and
        # again.
        closed = closing.closed
        async with self.place.lock:
            if not self.own_round.begin(ballot, closing):
                return pb.BeginReply(refusal=self._refusal(Refused(f"attempt {ballot.attempt} was given up")))
            standing, result = self.place.standing, self.own_round.result
            counts = self._counts(closed)
            self.context.events.write(
                Begin(round=standing.round, lineage=standing.lineage, attempt=ballot.attempt, leader=ballot.leader_id)
            )
            return pb.BeginReply(
                num_samples=counts.num_samples,
                num_targets=counts.num_targets,
                round_samples=counts.round_samples,
                committed_gaps=messages.pack_indices(closed.contribution.committed),
                prepared=result.prepared if result and self.place.group.prepared else None,
                since=messages.pack_ballot(self.place.group.since),
                norm=counts.norm,
                num_elements=closed.vector_D.numel(),
                bytes_per_second=self.own_round.exchanges.bytes_per_second,
            )

    async def average(self, request: pb.AverageRequest) -> pb.AverageReply:
        """Exchange with the other members and keep the result. The exchange ends early after an abort, a newer attempt,
        or doubt about the leader.

        Raises MalformedMessage for another leader's attempt, or for shares that make no sense.
        """
        ballot = messages.own_ballot(request)
        shares = shares_of(request.shares, self.context.config, self.context.own.block)
        try:
            async with self.place.lock:
                attempt = self._join(request, ballot, shares)
            average, seconds = await attempt.exchange(self._others(request, attempt), request.timeout_seconds)
            unflatten, like = self.own_round.exchanges.unflatten, attempt.closed.contribution.tensors
            tensors = await asyncio.to_thread(unflatten, average.vector_D, like)
            # Once the result is prepared it may be decided, and other stages then need this average. So it is offered
            # first.
            digest = await self.shared.offer(request.round, average.digest, tensors)
            average = replace(average, digest=digest)
            result = await asyncio.to_thread(self._result_of, average, tensors, seconds, attempt, shares)
            async with self.place.lock:
                self.place.group.prepare(request.round, ballot, average.digest)
                self.own_round.keep(result)
                self.context.events.write(
                    Prepare(
                        round=request.round,
                        lineage=self.place.standing.lineage,
                        attempt=ballot.attempt,
                        leader=ballot.leader_id,
                        digest=average.digest,
                        samples=average.num_samples,
                        members=result.round_result.members,
                    )
                )
        except Refused as refused:
            return pb.AverageReply(refusal=self._refusal(refused))
        except MemberFailed as failed:
            return pb.AverageReply(failure=messages.pack_failure(failed))
        return pb.AverageReply(prepared=result.prepared)

    def _join(self, request: pb.AverageRequest, ballot: Ballot, shares: Shares) -> Attempt:
        attempt = self.own_round.attempt
        if attempt is None or attempt.ballot != ballot:
            raise Refused(f"attempt {ballot.attempt} of {ballot.leader_id} has not begun here")
        own = shares.of(self.context.own_id).counts
        if (own, shares.num_elements) != (self._counts(attempt.closed), attempt.closed.vector_D.numel()):
            raise Refused("the shares do not name this member's contribution")
        config = self.context.config
        wanted = config.round_samples_of(self.context.own.block)
        if config.rounds.synchronous and shares.round_samples != wanted:
            raise Refused(f"the members have {shares.round_samples} samples, and a round has {wanted}")
        self.place.group.join(request.round, ballot, shares.digest)
        attempt.open(shares)
        return attempt

    def _counts(self, closed: Closed) -> Counts:
        return Counts.of(closed.contribution, closed.norm).bounded(self.context.config, self.context.own.block)

    def _others(self, request: pb.AverageRequest, attempt: Attempt) -> OtherMembers:
        opening = pb.ExchangeOpen(
            address=self.context.address,
            peer_id=self.context.own_id,
            round=request.round,
            ballot=request.ballot,
            shares_digest=self.place.group.shares_digest,
        )
        block = self.context.own.block
        records = {share.contact.peer_id: record_of(share.contact, block) for share in request.shares}
        return OtherMembers(
            context=self.context,
            records=records,
            opening=opening,
            timeout_seconds=request.timeout_seconds,
            silence_seconds=attempt.silence_seconds(),
        )

    def _result_of(
        self, average: Average, tensors: Tensors, seconds: float, attempt: Attempt, shares: Shares
    ) -> Result:
        standing, closed = self.place.standing, attempt.closed
        member_ids = [share.peer_id for share in shares.members]
        squared_norm = average.squared_norm
        if self.shared.is_due(standing.round):
            squared_norm = self.shared.squared_norm_of_rest(tensors)
        prepared = pb.Prepared(
            ballot=messages.pack_ballot(attempt.ballot),
            digest=average.digest,
            squared_norm=squared_norm,
            member_ids=member_ids,
            num_samples=average.num_samples,
        )
        cost = RoundCost(
            bytes_sent=average.bytes_sent,
            bytes_received=average.bytes_received,
            compression_ratio=average.compression_ratio,
            exchange_seconds=seconds,
            contribution_norm=closed.norm if closed.contribution.num_samples else 0.0,
        )
        result = RoundResult(
            round=standing.round,
            tensors=tensors,
            num_samples=average.num_samples,
            squared_norm=average.squared_norm,
            total_squared_norm=average.squared_norm,
            members=tuple(member_ids),
            # Set later, because the lineage depends on what the other stages decide.
            lineage="",
            attempts=attempt.ballot.attempt,
            digest=average.digest,
            cost=cost,
            closing=closed.contribution.closing,
        )
        return Result(
            prepared=prepared,
            round_result=result,
            residual=average.residual,
            fragment=closed.contribution.fragment,
            began_at=attempt.began_at,
        )

    async def serve(self, opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> Payload:
        """Take another member's part and return the sum; or, in a gather, return this member's contribution.

        Raises:
            Refused: the call belongs to another attempt, or to other members.
            MemberFailed: the exchange failed, so there will be no answer.
            MalformedMessage: the caller sent more bytes than the part has.
        """
        attempt = self.own_round.attempt
        ballot = messages.unpack_ballot(opening.ballot)
        if attempt is None or self.place.group.active is None or attempt.ballot != ballot:
            raise Refused(f"attempt {opening.ballot.attempt} of {opening.ballot.leader_id} is not under way here")
        return await attempt.serve(opening.peer_id, opening.shares_digest, pieces)

    # -- second phase ------------------------------------------------------------------------------------------------

    async def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Apply the prepared result. Runs to its end even if the leader hangs up."""
        outcome = pb.Outcome(
            round=request.round,
            prepared=pb.Prepared(digest=request.digest),
            partners=request.partners,
            total_squared_norm=request.total_squared_norm,
            stage_squared_norm=request.stage_squared_norm,
        )
        try:
            await self.advance.apply(outcome)
        except Refused as refused:
            return pb.CommitReply(refusal=self._refusal(refused))
        return pb.CommitReply(state_digest=await self.advance.state_digest())

    async def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Give the attempt up, with what it prepared, and go on training.

        Runs to its end even if the leader hangs up. Raises MalformedMessage for another leader's attempt.
        """
        ballot = messages.own_ballot(request)
        refused: Refused | None = await asyncio.shield(self.context.tasks.spawn(self._abort(request, ballot)))
        return pb.AbortReply(refusal=self._refusal(refused)) if refused is not None else pb.AbortReply()

    async def _abort(self, request: pb.AbortRequest, ballot: Ballot) -> Refused | None:
        async with self.place.lock:
            try:
                self._require_follower(ballot)
                was_active = self.place.group.active
                self.place.group.abort(request.round, ballot, void=request.void)
            except Refused as refused:
                return refused
            if was_active == ballot:
                await self.own_round.reopen(request.reason, ballot)
        return None

    def _require_follower(self, ballot: Ballot) -> None:
        """Raise Refused if the leader of an attempt is passed over here: its numbers would outbid its successor's."""
        if ballot.leader_id in self.roster.passed_over.peers - {self.context.own_id}:
            raise Refused(f"{ballot.leader_id} does not lead here any more")

    def _refusal(self, refused: Refused) -> pb.Refusal:
        promised = messages.pack_ballot(self.place.group.promised)
        return pb.Refusal(reason=str(refused), promised=promised, round=self.place.group.round)
