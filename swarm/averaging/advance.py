"""How a member gets from one round to another: by a commit, by a round that others committed, or by their state.

Each of these ways changes the stage once, and then updates the member's place. Only committed results are applied.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Refused
from swarm.averaging.agreement.place import Place
from swarm.averaging.donor import Donor
from swarm.averaging.own_round import OwnRound
from swarm.averaging.roster import Roster
from swarm.averaging.vectors import results
from swarm.averaging.vectors.results import Committed
from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.wire.context import Context
from swarm.errors import IntegrityError, MalformedMessage, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.complaints import Named
from swarm.training.round_member import RoundMember, Snapshot
from swarm.training.tally import EMPTY, Signature, Tally

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Advance:
    context: Context
    place: Place
    member: RoundMember
    own_round: OwnRound
    shared: TiedParameters
    donor: Donor
    roster: Roster
    _state_digest: asyncio.Future[str] | None = field(default=None, init=False)
    """The digest of the state at the beginning of the round; it is computed while training goes on."""

    @asynccontextmanager
    async def catching_up(self) -> AsyncIterator[None]:
        """Mark the member as catching up while the block runs: it promises no attempt, and the stage admits less."""
        with self.place.catching_up():
            self.member.set_behind(True)
            try:
                await self.own_round.step_back("this peer is behind its group")
                yield
            finally:
                self.member.set_behind(False)

    async def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Answer the leader's Commit: apply the prepared result, by which the stage takes its outer step and begins the
        next round. Runs to its end even if the leader hangs up."""
        outcome = pb.Outcome(
            round=request.round, prepared=pb.Prepared(digest=request.digest, signatures=request.signatures),
            partners=request.partners, total_squared_norm=request.total_squared_norm,
            stage_squared_norm=request.stage_squared_norm,
        )  # fmt: skip
        try:
            await self.apply(outcome)
        except Refused as refused:
            return pb.CommitReply(refusal=self.place.refusal(refused))
        return pb.CommitReply(state_digest=await self.state_digest())

    async def apply(self, outcome: pb.Outcome) -> None:
        """Apply the prepared result, once. Raises Refused if `outcome` is about another result."""
        await self._to_its_end(self._apply(outcome))

    async def _apply(self, outcome: pb.Outcome) -> Refused | None:
        round_number, digest = outcome.round, outcome.prepared.digest
        async with self.place.lock:
            try:
                if not self.place.group.check_commit(round_number, digest):
                    return None
                kept = self.own_round.result
                assert kept is not None
                results.require_norms(outcome, kept.prepared.squared_norm)
            except MalformedMessage as error:
                # The round is decided. This member may still get the right norm for clipping from another member.
                logger.warning("the commit of round %d is refused: %s", round_number, error)
                return Refused(str(error))
            except Refused as refused:
                return refused
            await self.own_round.stop("the round was committed")
            tensors = dict(kept.round_result.tensors)
            if self.shared.is_due(round_number):
                try:
                    tensors |= await self.shared.sum(round_number, outcome.partners, kept.prepared.amended)
                except SwarmError as error:
                    # The round is decided, so the others commit it. This member will find itself behind, and catch up.
                    return Refused(str(error))
            # They go to all that ask for the round, so a leader must not make them long.
            told = list(filter(messages.is_short, outcome.prepared.signatures))[: len(kept.prepared.member_ids)]
            outcome.prepared.CopyFrom(kept.prepared)
            outcome.prepared.signatures.extend(told)
            kept.exchanges.committed(kept.fragment, kept.residual)
            self.own_round.let_go()
            result = replace(
                kept.round_result,
                tensors=tensors,
                total_squared_norm=outcome.total_squared_norm,
                lineage=messages.lineage_after(self.place.standing.lineage, outcome),
                partners=messages.digests_of(outcome.partners),
                tally=await self._settled(kept.round_result.tally, outcome.prepared),
                cost=replace(
                    kept.round_result.cost,
                    seconds=self.context.clock.monotonic() - kept.began_at,
                    residual_bytes=self.own_round.exchanges.residual_bytes,
                ),
            )
            named = await self._named(kept.round_result.tally, messages.unpack_signatures(outcome.prepared))
            self._state_digest = await self.member.apply(result)
            before = self.place.standing
            self.place.group.commit(round_number, digest)
            self.place.committed(messages.standing_of(self.member.progress()), outcome)
            self._moved(outcome, named)
            after, digests = self.place.standing, self._state_digest
            self.donor.committed(
                Committed(
                    before=before, after=after, result=result, outcome=outcome, state_digest=digests,
                    amendments=self.place.timeline.texts,
                )
            )  # fmt: skip
        return None

    async def state_digest(self) -> str:
        """Wait for the digest of the state at the beginning of the round. There is one only after a result was
        applied."""
        assert self._state_digest is not None, "a result was applied"
        return await asyncio.shield(self._state_digest)

    async def install(
        self, snapshot: Snapshot, outcomes: list[pb.Outcome], past: Sequence[str], amendments: Sequence[str] = ()
    ) -> None:
        """Install a downloaded state. Runs to its end even if the caller is cancelled.

        Args:
            outcomes: how the last rounds before the snapshot were committed.
            past: the lineages of the last rounds before the snapshot, oldest first.
            amendments: those that its donors know.

        Raises:
            IntegrityError: the snapshot does not fit this stage, or an amendment is not the owner's.
        """
        self.place.timeline.add(amendments)
        await self._to_its_end(self._install(snapshot, outcomes, past))

    async def _install(
        self, snapshot: Snapshot, outcomes: list[pb.Outcome], past: Sequence[str]
    ) -> IntegrityError | None:
        async with self.place.lock:
            await self.own_round.stop("a newer state was downloaded")
            snapshot = replace(snapshot, tally=await self._checked(snapshot, outcomes))
            named = await self._named(snapshot.tally, snapshot.tally.signatures.values())
            try:
                await self.member.install(snapshot, carry=self._gave_nothing_until(snapshot, outcomes))
            except IntegrityError as unfit:
                return unfit
            self.own_round.exchanges.reset()
            self.donor.jumped()
            self.place.group.install(snapshot.round)
            self.place.installed(messages.standing_of(self.member.progress()), outcomes, past)
            self._moved(outcomes[-1] if outcomes else None, named)
        return None

    def _gave_nothing_until(self, snapshot: Snapshot, outcomes: list[pb.Outcome]) -> bool:
        """Whether this member contributed nothing to any of the rounds between its own place and the snapshot.

        False if that is not known, because `outcomes` hold only the last rounds.
        """
        lineage, known = self.place.standing.lineage, {outcome.round: outcome for outcome in outcomes}
        for number in range(self.place.standing.round, snapshot.round):
            outcome = known.get(number)
            if outcome is None or self.context.own_id in outcome.prepared.member_ids:
                return False
            lineage = messages.lineage_after(lineage, outcome)
        return self.place.is_sound and lineage == snapshot.lineage

    async def apply_missed(self, committed: Committed) -> None:
        """Apply a round that the group committed without this member. Does nothing unless the member is where that
        round began.

        Runs to its end even if the caller is cancelled.

        Raises:
            IntegrityError: the result does not fit this stage, or gave another state here than at its members. In the
                second case this member's state is no longer sound.
        """
        await self._to_its_end(self._apply_missed(committed))

    async def _apply_missed(self, committed: Committed) -> IntegrityError | None:
        async with self.place.lock:
            if committed.before != self.place.standing or not self.place.is_sound:
                return None
            await self.own_round.stop("the round was committed without this member")
            # As before any commit, the contribution is closed: nothing may be in flight, and the average must have the
            # contribution's shapes.
            contribution = await self.member.freeze(self.place.standing.round, drop=())
            try:
                self.place.timeline.add(committed.amendments)
                config = self.place.timeline.under(committed.result.amended)
                results.require_counts(committed.result, config, self.context.own.block)
                await asyncio.to_thread(results.require_applicable, committed.result, contribution.tensors)
            except IntegrityError as wrong:
                self.place.group.step_back()
                await self.own_round.reopen("a result came that cannot be this round's")
                return wrong
            contributed, closing = self.context.own_id in committed.result.members, None
            kept = self.own_round.result
            if kept is not None and kept.prepared.digest == committed.result.digest:
                # This member took part in the exchange, but the commit did not reach it.
                kept.exchanges.committed(kept.fragment, kept.residual)
                closing = kept.round_result.closing
            elif contributed:
                # The result contains this member's old residual. The new residual, which that exchange left, is lost.
                self.own_round.exchanges.forget(contribution.fragment)
                # In a group this member's average may have become part of the result, which it never got.
                closing = self.own_round.given_to(messages.require_ballot(committed.outcome.prepared.ballot))
            tally, prepared = self.tally_after(committed.outcome.prepared), committed.outcome.prepared
            named = await self._named(tally, messages.unpack_signatures(prepared))
            tally = await self._signed_by_most(await self._settled(tally, prepared))
            result = replace(committed.result, contributed=contributed, closing=closing, tally=tally)
            self._state_digest = await self.member.apply(result)
            reached = messages.standing_of(self.member.progress())
            ours, theirs = [await asyncio.shield(digest) for digest in (self._state_digest, committed.state_digest)]
            if (ours, reached) != (theirs, committed.after):
                self.place.is_sound = False
                self.place.group.install(committed.before.round)
                self.own_round.end()
                self.donor.jumped()
                return IntegrityError(f"round {committed.before.round} gave another state here than at its members")
            self.place.group.install(reached.round, last_digest=committed.result.digest)
            self.place.applied_missed(reached, committed.outcome)
            self._moved(committed.outcome, named)
            self.donor.committed(committed)
        return None

    # -- the tally -----------------------------------------------------------------------------------------------------

    def tally_after(self, prepared: pb.Prepared) -> Tally:
        before, at = self.member.progress().tally, self.place.standing
        return before.after(
            at.round, parent=at.lineage, result=prepared.digest, given=messages.unpack_given(prepared)
        )  # fmt: skip

    def signatures_of(self, tally: Tally) -> list[pb.TallySignature]:
        """This peer's own signature, if it has a key and there is something to sign."""
        if self.context.sign is None or not tally.members:
            return []
        text = self.own_round.exchanges.suspects.complaints(self.context.own_id).to_text()
        signed = tally.sign(self.context.sign, self.context.config.run_id, self.context.own.block, text)
        return [pb.TallySignature(point=signed.point, signature=signed.signature, tally=signed.digest, complaints=text)]

    async def _settled(self, tally: Tally, prepared: pb.Prepared) -> Tally:
        signatures, run_id = messages.unpack_signatures(prepared), self.context.config.run_id
        return await asyncio.to_thread(tally.settled, signatures, run_id, self.context.own.block)

    async def _named(self, tally: Tally, signatures: Iterable[Signature]) -> dict[str, Named]:
        return await asyncio.to_thread(tally.named, signatures, self.context.config.run_id, self.context.own.block)

    async def _signed_by_most(self, tally: Tally) -> Tally:
        """A tally of which another peer gave a part, or all; an empty one unless most of the last round's members have
        signed it."""
        place = self.context.config.run_id, self.context.own.block
        return tally if await asyncio.to_thread(tally.is_signed_by_most, *place) else EMPTY

    async def _checked(self, snapshot: Snapshot, outcomes: list[pb.Outcome]) -> Tally:
        """A donor's tally if it is of the last round before the snapshot. Where the donor has gone on from a checkpoint
        and committed nothing since, nobody tells who the members of that round were."""
        tally = snapshot.tally
        for last in outcomes[-1:]:
            told = tally.result, set(tally.members), messages.lineage_after(tally.parent, last)
            if told != (last.prepared.digest, set(last.prepared.member_ids), snapshot.lineage):
                return EMPTY
        return await self._signed_by_most(tally) if tally.round == snapshot.round - 1 else EMPTY

    async def snapshot(self) -> Snapshot:
        async with self.place.lock:
            return await self.member.snapshot()

    async def _to_its_end(self, work: Coroutine[Any, Any, Exception | None]) -> None:
        """Wait for work, which goes on even if the caller is cancelled. Raises the error that it returns."""
        error: Exception | None = await asyncio.shield(self.context.tasks.spawn(work))
        if error is not None:
            raise error

    def _moved(self, outcome: pb.Outcome | None, named: Mapping[str, Named]) -> None:
        """Begin the round after this outcome, whose members have `named` liars."""
        if outcome is not None:
            # Without one, nobody tells who the members are whose word counts.
            self.own_round.exchanges.suspects.take_over(named)
            self.roster.passed_over.committed(outcome)
        self.own_round.end()
        self.roster.moved()
        self.context.changes.progressed()
        self.context.changes.notify()
