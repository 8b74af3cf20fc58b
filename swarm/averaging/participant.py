"""A member's duties: how it answers a leader's Begin, Average and Abort; Commit is answered by advance.

The leader is a participant too. Keeps the pure group state consistent with this member's work (own_round) and with the
exchange. Never decides anything about a round.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from swarm.averaging.advance import Advance
from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Ballot, MemberFailed, Refused
from swarm.averaging.agreement.place import Place
from swarm.averaging.agreement.rules import given_fault
from swarm.averaging.agreement.shares import Counts, Shares, most_samples, prepared_of, shares_of
from swarm.averaging.own_round import Attempt, OwnRound, Result
from swarm.averaging.roster import Roster
from swarm.averaging.vectors.exchange import Closed, given_after
from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.vectors.terms import Average, digest_of_whole
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import ABORT, AVERAGE, BEGIN, COMMIT, OtherMembers, Payload, record_of
from swarm.events import Begin, Prepare
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundCost, RoundResult, Tensors
from swarm.training.sketches import NOTHING_STATED, Stated


@dataclass(eq=False)
class Participant:
    context: Context
    place: Place
    own_round: OwnRound
    advance: Advance
    shared: TiedParameters
    roster: Roster

    @property
    def answers(self) -> dict[str, Callable[[Any], Any]]:
        commit = self.advance.commit
        return {BEGIN.name: self.begin, AVERAGE.name: self.average, COMMIT.name: commit, ABORT.name: self.abort}

    # -- first phase -------------------------------------------------------------------------------------------------

    async def begin(self, request: pb.BeginRequest) -> pb.BeginReply:
        """Promise the attempt and close the contribution: the stage freezes it, with DiLoCo its anchor minus its
        weights (`contribute` in diloco_weights). If that takes long, the answer reports its progress.

        Closing goes on if this call is cancelled. Raises MalformedMessage for another leader's attempt.
        """
        ballot, clock = messages.own_ballot(request), self.context.clock
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
                self._require_same_amendments(request)
                self.place.group.begin(request.standing.round, ballot)
            except Refused as refused:
                return pb.BeginReply(refusal=self.place.refusal(refused), amendments=self.place.timeline.texts)
            self.own_round.end_exchange(f"attempt {ballot.attempt} of {ballot.leader_id} began")
            closing = self.own_round.close(frozenset(messages.unpack_indices(request.drop_gaps)), request.amended)
        finally:
            self.place.lock.release()
        if not await closing.wait(max(0.0, gives_up_at - clock.monotonic())):
            return pb.BeginReply(closing=self.own_round.closing_report())
        # An error of freezing is raised before any refusal, because after a refusal the leader would try again and
        # again.
        closed = closing.closed
        async with self.place.lock:
            if not self.own_round.begin(ballot, closing):
                return pb.BeginReply(refusal=self.place.refusal(Refused(f"attempt {ballot.attempt} was given up")))
            standing, result = self.place.standing, self.own_round.result
            counts, config = self._counts(closed, closing.amended), self.place.timeline.under(closing.amended)
            self.context.events.write(
                Begin(
                    round=standing.round, lineage=standing.lineage, attempt=ballot.attempt, leader=ballot.leader_id,
                    # 0 while that is what the run began with.
                    most_samples=most_samples(config, self.context.own.block) if closing.amended else 0,
                )
            )  # fmt: skip
            return pb.BeginReply(
                num_samples=counts.num_samples, num_targets=counts.num_targets, round_samples=counts.round_samples,
                committed_gaps=messages.pack_indices(closed.contribution.committed),
                prepared=result.prepared if result and self.place.group.prepared else None,
                since=messages.pack_ballot(self.place.group.since), norm=counts.norm,
                num_elements=closed.vector_D.numel(), bytes_per_second=self.own_round.exchanges.bytes_per_second,
                amended=closing.amended,
            )  # fmt: skip

    def _require_same_amendments(self, request: pb.BeginRequest) -> None:
        """Take in the leader's amendments. Raises Refused unless those in force are then the same here as there: else
        the members would compute different numbers."""
        timeline = self.place.timeline
        timeline.hear(request.amendments, request.peer_id)
        if timeline.digest_at(request.standing.round) != request.amended:
            raise Refused("this member knows of amendments of which the leader has not heard, or the other way round")

    async def average(self, request: pb.AverageRequest) -> pb.AverageReply:
        """Exchange with the other members and keep the result, or a group's average. `attempt.exchange` runs the
        butterfly (allreduce), while `serve` feeds what the others send to this member's Reduction. The exchange ends
        early after an abort, a newer attempt, or doubt about the leader.

        Raises MalformedMessage for another leader's attempt, or for shares that make no sense.
        """
        ballot = messages.own_ballot(request)
        # Only the leader sees all counts that are in a group's.
        num_members = max(1, len(request.member_ids))
        try:
            async with self.place.lock:
                attempt = self.own_round.attempt
                if attempt is None or attempt.ballot != ballot:
                    raise Refused(f"attempt {ballot.attempt} of {ballot.leader_id} has not begun here")
                config, block = self.place.timeline.under(attempt.amended), self.context.own.block
                shares = shares_of(request.shares, config, block, num_members, attempt.amended)
                self._join(request, attempt, shares, num_members)
            others = self._others(request, shares, attempt)
            average, seconds = await attempt.exchange(shares, others, request.timeout_seconds)
            attempt.exchanges.require_in_line(attempt.closed, request.round, shares, average, self.context.events)
            unflatten, like = attempt.exchanges.unflatten, attempt.closed.contribution.tensors
            tensors = await asyncio.to_thread(unflatten, average.vector_D, like)
            closed = _closed_anew(attempt.closed, average, tensors, shares)
            cost = _added(attempt.cost, average, seconds)
            given = given_after(messages.unpack_given(request), shares, config.averaging)
            made = prepared_of(request, shares, average.digest, average.squared_norm, given)
            if request.is_part:
                async with self.place.lock:
                    self.place.group.keep_part(request.round, ballot)
                    self.own_round.go_on(attempt, closed, cost, given)
                return pb.AverageReply(prepared=made)
            prepared = await self._prepare(request, made, average, tensors, shares)
            result = self._result_of(prepared, average, tensors, attempt, cost)
            async with self.place.lock:
                if not _hands_down(request, shares, self.context.own_id):
                    self.place.group.prepare(request.round, ballot, prepared.digest)
                    self._write_prepared(result)
                self.own_round.keep(result)
                if prepared.decider_ids:
                    self.own_round.go_on(attempt, closed, cost, result.round_result.given)
        except Refused as refused:
            return pb.AverageReply(refusal=self.place.refusal(refused))
        except MemberFailed as failed:
            return pb.AverageReply(failure=messages.pack_failure(failed))
        return pb.AverageReply(prepared=prepared)

    def _join(self, request: pb.AverageRequest, attempt: Attempt, shares: Shares, num_members: int) -> None:
        config = self.place.timeline.under(attempt.amended)
        own = shares.of(self.context.own_id).counts
        hands_down = request.HasField("handed_down")
        expected = own if hands_down else self._counts(attempt.closed, attempt.amended, num_members)
        if (own, shares.num_elements) != (expected, attempt.closed.vector_D.numel()):
            raise Refused("the shares do not name this member's contribution")
        wanted = config.round_samples_of(self.context.own.block)
        if config.rounds.synchronous and shares.round_samples != wanted:
            raise Refused(f"the members have {shares.round_samples} samples, and a round has {wanted}")
        if hands_down and len(shares.senders) != 1:
            raise Refused("a result is handed down by one member")
        self._require_true(request, shares, attempt)
        if not _hands_down(request, shares, self.context.own_id):
            self.place.group.join(request.round, attempt.ballot, shares.digest)
        elif self.own_round.result is None or messages.unsigned(self.own_round.result.prepared) != request.handed_down:
            raise Refused("this member does not have the result that it is to hand down")
        attempt.open(shares)

    def _require_true(self, request: pb.AverageRequest, shares: Shares, attempt: Attempt) -> None:
        """Raise Refused if the leader says something false of what members have given, as far as this one can know."""
        result = request.handed_down if request.HasField("handed_down") else None
        if result is None and not request.member_ids:
            return
        given = messages.unpack_given(result or request)
        num_samples = result.num_samples if result else shares.round_samples
        own_id, block = self.context.own_id, self.context.own.block
        config = self.place.timeline.under(attempt.amended)
        if fault := given_fault(given, attempt.given, own_id, num_samples, shares.num_elements, config, block):
            raise Refused(f"the leader says that {fault}")

    def _counts(self, closed: Closed, amended: str, num_members: int = 1) -> Counts:
        counts = Counts.of(closed.contribution, closed.norm)
        return counts.bounded(self.place.timeline.under(amended), self.context.own.block, num_members)

    def _others(self, request: pb.AverageRequest, shares: Shares, attempt: Attempt) -> OtherMembers:
        stated = attempt.exchanges.stated(attempt.closed, shares)

        def opening(owner_id: str) -> pb.ExchangeOpen:
            microbatches, sketches = stated.get(owner_id, NOTHING_STATED)
            return pb.ExchangeOpen(
                address=self.context.address, peer_id=self.context.own_id, round=request.round, ballot=request.ballot,
                shares_digest=shares.digest, sketched_gaps=messages.pack_indices(microbatches), sketches=sketches,
            )  # fmt: skip

        block = self.context.own.block
        records = {share.contact.peer_id: record_of(share.contact, block) for share in request.shares}
        return OtherMembers(
            transport=self.context.transport, clock=self.context.clock, timing=self.context.timing, records=records,
            opening=opening, timeout_seconds=request.timeout_seconds,
            silence_seconds=attempt.silence_seconds(len(shares.members)),
        )  # fmt: skip

    async def _prepare(
        self, request: pb.AverageRequest, made: pb.Prepared, average: Average, tensors: Tensors, shares: Shares
    ) -> pb.Prepared:
        """The result that was made in a round's last exchange, or the one that was handed down. Raises MemberFailed if
        that is another one than the leader names."""
        is_handed_down, digest = request.HasField("handed_down"), average.digest
        named = messages.unsigned(request.handed_down) if is_handed_down else made
        if named.decider_ids:
            given = messages.unpack_given(named)
            digest = await asyncio.to_thread(digest_of_whole, given, average.vector_D, shares.amended)
        # Once the result is prepared it may be decided, and other stages then need this average. So it is offered
        # first.
        digest = await self.shared.offer(request.round, digest, tensors, shares.amended)
        if is_handed_down:
            same = (digest, request.ballot, shares.amended) == (named.digest, named.ballot, named.amended)
            if not same or not named.decider_ids:
                reason = "it handed down another result than the members of the last exchange have"
                raise MemberFailed(shares.senders[0].peer_id, reason, noticed_by=self.context.own_id)
            return named
        named.digest = digest
        if self.shared.is_due(request.round):
            named.squared_norm = await asyncio.to_thread(self.shared.squared_norm_of_rest, tensors)
        return named

    def _result_of(
        self, prepared: pb.Prepared, average: Average, tensors: Tensors, attempt: Attempt, cost: RoundCost
    ) -> Result:
        contribution, tally = attempt.closed.contribution, self.advance.tally_after(prepared)
        prepared.signatures.extend(self.advance.signatures_of(tally))
        # The same bits at every member: a result that was handed down came in other parts, whose norms are rounded.
        squared_norm = prepared.squared_norm if prepared.decider_ids else average.squared_norm
        result = RoundResult(
            round=self.place.standing.round, tensors=tensors, num_samples=prepared.num_samples,
            squared_norm=squared_norm, total_squared_norm=squared_norm, members=tuple(prepared.member_ids),
            # Set later, because the lineage depends on what the other stages decide.
            lineage="", attempts=attempt.ballot.attempt, digest=prepared.digest, cost=cost,
            closing=contribution.closing, amended=prepared.amended, given=messages.unpack_given(prepared), tally=tally,
        )  # fmt: skip
        return Result(
            prepared=prepared, round_result=result, residual=average.residual, exchanges=attempt.exchanges,
            fragment=contribution.fragment, began_at=attempt.began_at,
        )  # fmt: skip

    def _write_prepared(self, result: Result) -> None:
        made, ballot = result.round_result, result.prepared.ballot
        self.context.events.write(
            Prepare(
                round=made.round, lineage=self.place.standing.lineage, attempt=ballot.attempt, leader=ballot.leader_id,
                digest=made.digest, samples=made.num_samples, members=made.members,
            )
        )  # fmt: skip

    async def serve(self, opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> Payload:
        """Take another member's part and return the sum; or, in a gather, return this member's contribution. Raises
        Refused if the call belongs to another attempt, or to other members, MemberFailed if the exchange failed, so
        there will be no answer, and MalformedMessage if the caller sent more bytes than the part has."""
        attempt = self.own_round.attempt
        ballot = messages.unpack_ballot(opening.ballot)
        if attempt is None or self.place.group.active is None or attempt.ballot != ballot:
            raise Refused(f"attempt {opening.ballot.attempt} of {opening.ballot.leader_id} is not under way here")
        stated = Stated(sorted(messages.unpack_indices(opening.sketched_gaps)), opening.sketches)
        return await attempt.serve(opening.peer_id, opening.shares_digest, pieces, stated)

    # -- the attempt is given up -------------------------------------------------------------------------------------

    async def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Give the attempt up, with what it prepared, and go on training.

        Runs to its end even if the leader hangs up. Raises MalformedMessage for another leader's attempt.
        """
        ballot = messages.own_ballot(request)
        refused: Refused | None = await asyncio.shield(self.context.tasks.spawn(self._abort(request, ballot)))
        return pb.AbortReply(refusal=self.place.refusal(refused)) if refused is not None else pb.AbortReply()

    async def _abort(self, request: pb.AbortRequest, ballot: Ballot) -> Refused | None:
        async with self.place.lock:
            try:
                self._require_follower(ballot)
                was_active = self.place.group.active
                self.place.group.abort(request.round, ballot, void=request.void)
            except Refused as refused:
                return refused
            if was_active == ballot:
                await self.own_round.reopen(messages.unpack_reason(request.reason), ballot)
        return None

    def _require_follower(self, ballot: Ballot) -> None:
        """Raise Refused if the leader of an attempt is passed over here: its numbers would outbid its successor's."""
        if ballot.leader_id in self.roster.passed_over.peers - {self.context.own_id}:
            raise Refused(f"{ballot.leader_id} does not lead here any more")


def _hands_down(request: pb.AverageRequest, shares: Shares, own_id: str) -> bool:
    return request.HasField("handed_down") and shares.of(own_id).contributes


def _closed_anew(closed: Closed, average: Average, tensors: Tensors, shares: Shares) -> Closed:
    """What a group has averaged, as its contribution to the next exchange."""
    total = shares.total(average.squared_norm**0.5)
    contribution = replace(
        closed.contribution, tensors=tensors, num_samples=total.num_samples, num_targets=total.num_targets,
        round_samples=total.round_samples,
    )  # fmt: skip
    return Closed(contribution=contribution, vector_D=average.vector_D, norm=total.norm)


def _added(cost: RoundCost, average: Average, seconds: float) -> RoundCost:
    return replace(
        cost,
        bytes_sent=cost.bytes_sent + average.bytes_sent,
        bytes_received=cost.bytes_received + average.bytes_received,
        compression_ratio=average.compression_ratio,
        exchange_seconds=cost.exchange_seconds + seconds,
    )
