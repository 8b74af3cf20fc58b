"""A member's duties: what it does when a leader says begin, average, commit or abort.

Used by averaging/averager; the leader is a participant as well. Joins the pure group state to the stage and
to the exchange. Applies nothing but committed results, each once. Never decides anything about a round.
"""

import asyncio
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from swarm.averaging import messages, results
from swarm.averaging.allreduce import AllReduceTransport, Average
from swarm.averaging.attempt import Attempt
from swarm.averaging.changes import Changes
from swarm.averaging.closing import Closing
from swarm.averaging.context import Context
from swarm.averaging.donor import Donor
from swarm.averaging.exchange import Exchanges
from swarm.averaging.feedback import Residual
from swarm.averaging.group import Ballot, Refused
from swarm.averaging.place import Place
from swarm.averaging.reduction import MemberFailed, Payload
from swarm.averaging.results import Committed
from swarm.averaging.roster import Roster
from swarm.averaging.shared import SharedBlocks
from swarm.averaging.shares import Shares
from swarm.averaging.timing import Timing
from swarm.averaging.transport import Transport, record_of
from swarm.compression.codec import Buffer
from swarm.errors import IntegrityError, MalformedMessage, PeerUnavailable, SwarmError
from swarm.events.kinds import Abort, Begin, Prepare
from swarm.machine.clock import Clock
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundMember, RoundResult, Snapshot
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Result:
    """A finished exchange's result, applied or not."""

    prepared: pb.Prepared
    round_result: RoundResult
    residual: Residual
    fragment: int
    began_at: float


class Participant:
    """One member of one stage's group."""

    def __init__(
        self, context: Context, place: Place, member: RoundMember, *, shared: SharedBlocks, donor: Donor,
        roster: Roster, changes: Changes,
    ) -> None:  # fmt: skip
        """
        Args:
            donor: is told of every commit.
            roster: is told of every move.
        """
        self._context = context
        self._place = place
        self._member = member
        self._exchanges = Exchanges(context.config.averaging, context.own_id)
        self._shared = shared
        self._donor = donor
        self._roster = roster
        self._changes = changes
        self._clock = context.clock
        self._spawn = context.tasks.spawn
        self._closing: Closing | None = None
        """In this round, until it is opened again; may go on while nobody holds the lock."""
        self._attempt: Attempt | None = None
        self._result: _Result | None = None
        self._state_digest: asyncio.Future[str] | None = None
        """Of the state at the beginning of the round; taken beside training."""

    # -- first phase -------------------------------------------------------------------------------------------------

    async def begin(self, request: pb.BeginRequest) -> pb.BeginReply:
        """Promise the attempt and close the contribution, or say how far that is.

        Cancelled, it leaves the closing to go on. Raises MalformedMessage for another leader's attempt.
        """
        ballot = messages.own_ballot(request)
        gives_up_at = self._clock.monotonic() + max(0.0, min(request.wait_seconds, self._context.timing.begin_seconds))
        try:
            async with asyncio.timeout(gives_up_at - self._clock.monotonic()):
                await self._place.lock.acquire()
        except TimeoutError:  # As while a commit waits for the compute thread.
            return self._still_closing()
        try:
            try:
                if self._place.is_catching_up:
                    raise Refused("this member is catching up")
                if messages.unpack_standing(request.standing) != self._place.standing:
                    raise Refused(f"this member is at round {self._place.group.round}, or on another branch")
                self._place.group.begin(request.standing.round, ballot)
            except Refused as refused:
                return pb.BeginReply(refusal=self._refusal(refused))
            self._end_exchange(f"attempt {ballot.attempt} of {ballot.leader_id} began")
            closing = self._join_closing(frozenset(messages.unpack_indices(request.drop_gaps)))
        finally:
            self._place.lock.release()
        if not await closing.wait(max(0.0, gives_up_at - self._clock.monotonic())):
            return self._still_closing()
        # What freezing failed with comes first: an attempt that is merely refused would be tried again and again.
        closed = closing.closed
        async with self._place.lock:
            if closing is not self._closing or self._place.group.active != ballot:
                return pb.BeginReply(refusal=self._refusal(Refused(f"attempt {ballot.attempt} was given up")))
            contribution = closed.contribution
            self._context.events.write(
                Begin(
                    round=self._place.group.round, lineage=self._place.standing.lineage, attempt=ballot.attempt,
                    leader=ballot.leader_id,
                )
            )  # fmt: skip
            self._attempt = Attempt(
                ballot=ballot, own_id=self._context.own_id, closed=closed, began_at=closing.began_at,
                exchanges=self._exchanges, clock=self._clock, timing=self._context.timing,
            )  # fmt: skip
            return pb.BeginReply(
                num_samples=contribution.num_samples, round_samples=contribution.round_samples,
                committed_gaps=messages.pack_indices(contribution.committed),
                prepared=self._result.prepared if self._result and self._place.group.prepared else None,
                since=messages.pack_ballot(self._place.group.since), norm=closed.norm,
                num_elements=closed.vector_D.numel(), bytes_per_second=self._exchanges.bytes_per_second,
            )  # fmt: skip

    def _join_closing(self, drop: frozenset[int]) -> Closing:
        """What an earlier attempt has begun, or has frozen, if it is the same; else a new one."""
        before = self._closing
        if before is None or before.drop != drop:
            self._closing = Closing(drop=drop, began_at=self._clock.monotonic())
            self._spawn(self._close(self._closing, before))
            return self._closing
        return before

    async def _close(self, closing: Closing, before: Closing | None) -> None:
        if before is not None:
            await before.wait()
        failed = False
        try:
            contribution = await self._member.close(self._place.group.round, drop=closing.drop)
            closing.end(await self._exchanges.close(contribution))
        except Exception as error:  # noqa: BLE001 - it belongs to the attempts that wait for it
            logger.warning("the contribution could not be closed: %s", error)
            closing.end(error)
            failed = True
        async with self._place.lock:
            if closing is self._closing and (failed or self._place.group.active is None):
                # The attempts that wanted it are over.
                await self._member.reopen(self._place.group.round)
                self._closing = None

    async def _end_of_closing(self) -> None:
        """Wait until nothing is being frozen: calls of the stage never overlap."""
        if self._closing is not None:
            await self._closing.wait()

    def _still_closing(self) -> pb.BeginReply:
        activity, now = self._member.activity(), self._clock.monotonic()
        waited_seconds = now - self._closing.began_at if self._closing is not None else math.inf
        expected_seconds = max(
            activity.longest_seconds, activity.num_bytes / self._context.timing.work_bytes_per_second
        )
        return pb.BeginReply(
            closing=pb.Closing(
                quiet_seconds=min(activity.quiet_seconds, waited_seconds), expected_seconds=expected_seconds
            )
        )  # fmt: skip

    async def average(self, request: pb.AverageRequest) -> pb.AverageReply:
        """Exchange with the other members and keep the result. Ended by an abort, a doubt, or a newer attempt.

        Raises MalformedMessage for another leader's attempt, or for shares that make no sense.
        """
        ballot = messages.own_ballot(request)
        shares = messages.unpack_shares(request.shares)
        try:
            async with self._place.lock:
                attempt = self._join(request, ballot, shares)
            average, seconds = await attempt.exchange(self._others(request, attempt), request.timeout_seconds)
            result = await asyncio.to_thread(self._result_of, average, seconds, attempt, shares)
            # Before it is prepared: should this call end here with its leader, there may be nobody else who has it.
            await self._shared.offer(request.round, average.digest, result.round_result.tensors)
            async with self._place.lock:
                self._place.group.prepare(request.round, ballot, average.digest)
                self._result = result
                self._context.events.write(
                    Prepare(
                        round=request.round, lineage=self._place.standing.lineage, attempt=ballot.attempt,
                        leader=ballot.leader_id, digest=average.digest, samples=average.num_samples,
                        members=result.round_result.members,
                    )
                )  # fmt: skip
        except Refused as refused:
            return pb.AverageReply(refusal=self._refusal(refused))
        except MemberFailed as failed:
            return pb.AverageReply(failure=messages.pack_failure(failed))
        return pb.AverageReply(prepared=result.prepared)

    def _join(self, request: pb.AverageRequest, ballot: Ballot, shares: Shares) -> Attempt:
        attempt = self._attempt
        if attempt is None or attempt.ballot != ballot:
            raise Refused(f"attempt {ballot.attempt} of {ballot.leader_id} has not begun here")
        own, contribution = shares.of(self._context.own_id), attempt.closed.contribution
        if (own.num_samples, shares.num_elements) != (contribution.num_samples, attempt.closed.vector_D.numel()):
            raise Refused("the shares do not name this member's contribution")
        self._place.group.join(request.round, ballot, shares.digest)
        attempt.open(shares)
        return attempt

    def _others(self, request: pb.AverageRequest, attempt: Attempt) -> AllReduceTransport:
        opening = pb.ExchangeOpen(
            address=self._context.address, peer_id=self._context.own_id, round=request.round, ballot=request.ballot,
            shares_digest=self._place.group.shares_digest,
        )  # fmt: skip
        stage = self._context.own.stage
        records = {share.contact.peer_id: record_of(share.contact, stage) for share in request.shares}
        return _Others(
            transport=self._context.transport,
            records=records,
            opening=opening,
            timeout_seconds=request.timeout_seconds,
            silence_seconds=attempt.silence_seconds(),
            clock=self._clock,
            timing=self._context.timing,
        )

    def _result_of(self, average: Average, seconds: float, attempt: Attempt, shares: Shares) -> _Result:
        standing, closed = self._place.standing, attempt.closed
        member_ids = [share.peer_id for share in shares.members]
        tensors = self._exchanges.unflatten(average.vector_D, closed.contribution.tensors)
        squared_norm = average.squared_norm
        if self._shared.is_due(standing.round):
            squared_norm = self._shared.squared_norm_of_rest(tensors)
        prepared = pb.Prepared(
            ballot=messages.pack_ballot(attempt.ballot), digest=average.digest, squared_norm=squared_norm,
            member_ids=member_ids, num_samples=average.num_samples,
        )  # fmt: skip
        result = RoundResult(
            round=standing.round, tensors=tensors,
            num_samples=average.num_samples, squared_norm=average.squared_norm,
            total_squared_norm=average.squared_norm, members=tuple(member_ids),
            lineage="",  # Depends on what the other stages decide.
            attempts=attempt.ballot.attempt, bytes_sent=average.bytes_sent, bytes_received=average.bytes_received,
            compression_ratio=average.compression_ratio, seconds=0.0, digest=average.digest,
            exchange_seconds=seconds, contribution_norm=closed.norm if closed.contribution.num_samples else 0.0,
        )  # fmt: skip
        return _Result(
            prepared=prepared, round_result=result, residual=average.residual,
            fragment=closed.contribution.fragment, began_at=attempt.began_at,
        )  # fmt: skip

    async def exchange(self, opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> Payload:
        """Take another member's part and answer with the sum, or hand out this member's contribution.

        Raises:
            Refused: not this attempt, or not these members.
            MemberFailed: there will be no answer.
            MalformedMessage: more bytes than the part has.
        """
        attempt = self._attempt
        if (
            attempt is None
            or self._place.group.active is None
            or attempt.ballot != messages.unpack_ballot(opening.ballot)
        ):
            raise Refused(f"attempt {opening.ballot.attempt} of {opening.ballot.leader_id} is not under way here")
        return await attempt.serve(opening.peer_id, opening.shares_digest, pieces)

    # -- second phase ------------------------------------------------------------------------------------------------

    async def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Apply the prepared result. Runs to its end even if the leader hangs up."""
        try:
            await self.apply(
                pb.Outcome(
                    round=request.round, prepared=pb.Prepared(digest=request.digest), partners=request.partners,
                    total_squared_norm=request.total_squared_norm, stage_squared_norm=request.stage_squared_norm,
                )
            )  # fmt: skip
        except Refused as refused:
            return pb.CommitReply(refusal=self._refusal(refused))
        assert self._state_digest is not None, "a result was applied"
        return pb.CommitReply(state_digest=await asyncio.shield(self._state_digest))

    async def apply(self, outcome: pb.Outcome) -> None:
        """Apply the prepared result, once. Raises Refused if it is not the prepared one."""
        refused: Refused | None = await asyncio.shield(self._spawn(self._apply(outcome)))
        if refused is not None:
            raise refused

    async def _apply(self, outcome: pb.Outcome) -> Refused | None:
        round_number, digest = outcome.round, outcome.prepared.digest
        async with self._place.lock:
            try:
                if not self._place.group.check_commit(round_number, digest):
                    return None
                kept = self._result
                assert kept is not None
                results.require_norms(outcome, kept.prepared.squared_norm)
            except MalformedMessage as error:
                # The round is decided: what it was clipped by, this member may hear from another one.
                logger.warning("the commit of round %d is refused: %s", round_number, error)
                return Refused(str(error))
            except Refused as refused:
                return refused
            self._end_exchange("the round was committed")
            await self._end_of_closing()
            tensors = dict(kept.round_result.tensors)
            if self._shared.is_due(round_number):
                try:
                    tensors |= await self._shared.sum(round_number, outcome.partners)
                except SwarmError as error:
                    # The round is decided: this member will find itself behind, and catch up.
                    return Refused(str(error))
            outcome.prepared.CopyFrom(kept.prepared)
            self._exchanges.committed(kept.fragment, kept.residual)
            # Applying takes memory; what this member brought is not needed any more.
            self._attempt = None
            result = dataclasses.replace(
                kept.round_result, tensors=tensors, total_squared_norm=outcome.total_squared_norm,
                seconds=self._clock.monotonic() - kept.began_at, residual_bytes=self._exchanges.residual_bytes,
                lineage=messages.lineage_after(self._place.standing.lineage, outcome),
                partners=messages.digests_of(outcome.partners),
            )  # fmt: skip
            self._state_digest = await self._member.apply(result)
            before = self._place.standing
            self._place.group.commit(round_number, digest)
            self._place.committed(messages.standing_of(self._member.progress()), outcome)
            self._moved()
            self._donor.committed(
                Committed(
                    before=before,
                    after=self._place.standing,
                    result=result,
                    outcome=outcome,
                    state_digest=self._state_digest,
                )
            )
        return None

    async def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Give the attempt up, with what it prepared, and go on training.

        Runs to its end even if the leader hangs up. Raises MalformedMessage for another leader's attempt.
        """
        ballot = messages.own_ballot(request)
        refused: Refused | None = await asyncio.shield(self._spawn(self._abort(request, ballot)))
        return pb.AbortReply(refusal=self._refusal(refused)) if refused is not None else pb.AbortReply()

    async def _abort(self, request: pb.AbortRequest, ballot: Ballot) -> Refused | None:
        async with self._place.lock:
            try:
                was_active = self._place.group.active
                self._place.group.abort(request.round, ballot, void=request.void)
            except Refused as refused:
                return refused
            if was_active == ballot:
                await self._reopen(request.reason, ballot)
        return None

    async def step_back(self, reason: str, *, only: Ballot | None = None) -> None:
        """In doubt about the leader: go on training, but keep what is prepared for the next leader to find.

        Args:
            only: from this attempt; None for whatever attempt is under way.
        """
        async with self._place.lock:
            active = self._place.group.active
            if active is not None and only in (None, active):
                self._place.group.step_back()
                await self._reopen(reason, active)

    async def install(self, snapshot: Snapshot, outcomes: list[pb.Outcome], past: Sequence[str]) -> None:
        """Become a downloaded state. Runs to its end even if the caller is cancelled.

        Args:
            outcomes: how the last rounds before it were committed.
            past: the lineages of the last rounds before it, oldest first.

        Raises:
            IntegrityError: it does not fit this stage.
        """
        unfit: IntegrityError | None = await asyncio.shield(self._spawn(self._install(snapshot, outcomes, past)))
        if unfit is not None:
            raise unfit

    async def _install(
        self, snapshot: Snapshot, outcomes: list[pb.Outcome], past: Sequence[str]
    ) -> IntegrityError | None:
        async with self._place.lock:
            self._end_exchange("a newer state was downloaded")
            await self._end_of_closing()
            try:
                await self._member.install(snapshot, carry=self._gave_nothing_until(snapshot, outcomes))
            except IntegrityError as unfit:
                return unfit
            self._exchanges.reset()
            self._donor.jumped()
            self._place.group.install(snapshot.round)
            self._place.installed(messages.standing_of(self._member.progress()), outcomes, past)
            self._moved()
        return None

    def _gave_nothing_until(self, snapshot: Snapshot, outcomes: list[pb.Outcome]) -> bool:
        """Whether a later state of this member's own branch came about without anything of it since `standing`.

        False where that cannot be told: only the last rounds are known.
        """
        lineage, known = self._place.standing.lineage, {outcome.round: outcome for outcome in outcomes}
        for number in range(self._place.standing.round, snapshot.round):
            outcome = known.get(number)
            if outcome is None or self._context.own_id in outcome.prepared.member_ids:
                return False
            lineage = messages.lineage_after(lineage, outcome)
        return self._place.is_sound and lineage == snapshot.lineage

    async def replay(self, committed: Committed) -> None:
        """Apply a round that the group committed without this member. Nothing happens unless it stands right before.

        Runs to its end even if the caller is cancelled.

        Raises:
            IntegrityError: it does not fit this stage; or it gave another state, and then this one is not sound.
        """
        wrong: IntegrityError | None = await asyncio.shield(self._spawn(self._replay(committed)))
        if wrong is not None:
            raise wrong

    async def _replay(self, committed: Committed) -> IntegrityError | None:
        async with self._place.lock:
            if committed.before != self._place.standing or not self._place.is_sound:
                return None
            self._end_exchange("the round was committed without this member")
            await self._end_of_closing()
            # Closed as before any commit: nothing may be in flight, and the contribution has the average's shapes.
            contribution = await self._member.close(self._place.standing.round, drop=())
            try:
                await asyncio.to_thread(results.require_applicable, committed.result, contribution.tensors)
            except IntegrityError as wrong:
                self._place.group.step_back()
                await self._reopen("a result came that cannot be this round's")
                return wrong
            contributed = self._context.own_id in committed.result.members
            if self._result is not None and self._result.prepared.digest == committed.result.digest:
                # It took part, and lost sight of the others before the end.
                self._exchanges.committed(self._result.fragment, self._result.residual)
            elif contributed:
                # What it owed is in the result; what the encoding dropped then, nobody knows any more.
                self._exchanges.forget(contribution.fragment)
            self._state_digest = await self._member.apply(
                dataclasses.replace(committed.result, contributed=contributed)
            )
            reached = messages.standing_of(self._member.progress())
            ours, theirs = [await asyncio.shield(digest) for digest in (self._state_digest, committed.state_digest)]
            if (ours, reached) != (theirs, committed.after):
                self._place.spoiled()
                self._place.group.install(committed.before.round)
                self._attempt = self._result = self._closing = None
                self._donor.jumped()
                return IntegrityError(f"round {committed.before.round} gave another state here than at its members")
            self._place.group.install(reached.round)
            self._place.group.last_digest = committed.result.digest
            self._place.replayed(reached, committed.outcome)
            self._moved()
            self._donor.committed(committed)
        return None

    async def snapshot(self) -> Snapshot:
        """The state at the last committed round."""
        async with self._place.lock:
            return await self._member.snapshot()

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _moved(self) -> None:
        self._attempt = self._result = self._closing = None
        self._roster.moved(self._place.standing, self._place.last_members)
        self._changes.progressed()
        self._changes.notify()

    async def _reopen(self, reason: str, ballot: Ballot | None = None) -> None:
        self._end_exchange(reason)
        if ballot is not None:
            self._context.events.write(
                Abort(round=self._place.group.round, attempt=ballot.attempt, leader=ballot.leader_id, reason=reason)
            )
        self._attempt = None
        if self._place.group.prepared is None:
            self._result = None
        if self._closing is None or self._closing.is_over:
            self._closing = None
            await self._member.reopen(self._place.group.round)
        # Else it goes on, for the next attempt; if there is none by its end, the round is opened then.

    def _end_exchange(self, reason: str) -> None:
        if self._attempt is not None:
            self._attempt.end(reason)

    def _refusal(self, refused: Refused) -> pb.Refusal:
        return pb.Refusal(
            reason=str(refused),
            promised=messages.pack_ballot(self._place.group.promised),
            round=self._place.group.round,
        )


@dataclass(frozen=True, kw_only=True)
class _Others:
    """The other members, as the exchange reaches them."""

    transport: Transport
    records: dict[str, PeerRecord]
    opening: pb.ExchangeOpen
    timeout_seconds: float
    silence_seconds: float
    clock: Clock
    timing: Timing

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
            # No task group: what is raised through one is held in a cycle, with all frames and their vectors.
            async with asyncio.timeout(None) as scope:
                watching = asyncio.create_task(watch(scope))
                try:
                    return await self.transport.exchange(
                        peer, self.opening, part, reply_bytes=reply_bytes, timeout_seconds=self.timeout_seconds,
                        silence_seconds=None if waits else self.silence_seconds,
                    )  # fmt: skip
                finally:
                    watching.cancel()
                    del watching, scope  # Likewise.
        except TimeoutError:
            if not silence:
                raise
            raise PeerUnavailable(silence[0]) from None

    async def _watch(self, peer: PeerRecord) -> None:
        """Raise SwarmError once a member does not answer: that shows long before an exchange takes too long."""
        while True:
            await self.clock.sleep(self.timing.heartbeat_seconds)
            await self.transport.ping(peer, timeout_seconds=self.timing.report_seconds)
