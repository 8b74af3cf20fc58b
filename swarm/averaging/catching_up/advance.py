"""How a member gets from one round to another: by a commit, by a round that others committed, or by their state.

Used by exchanging/participant and members/survey, which hear of commits, and by catching_up/catch_up. Each of these
ways changes the stage once and then tells the other parts where the member stands. Only committed results are applied.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from swarm.averaging import messages
from swarm.averaging.catching_up import results
from swarm.averaging.catching_up.donor import Donor
from swarm.averaging.catching_up.results import Committed
from swarm.averaging.context import Context
from swarm.averaging.exchanging.own_round import OwnRound
from swarm.averaging.exchanging.shared import SharedBlocks
from swarm.averaging.leading.group import Refused
from swarm.averaging.members.roster import Roster
from swarm.averaging.place import Place
from swarm.errors import IntegrityError, MalformedMessage, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundMember, Snapshot

logger = logging.getLogger(__name__)


class Advance:
    """Brings one member from round to round."""

    def __init__(
        self,
        context: Context,
        place: Place,
        member: RoundMember,
        own_round: OwnRound,
        *,
        shared: SharedBlocks,
        donor: Donor,
        roster: Roster,
    ) -> None:
        """
        Args:
            donor: is told of every commit.
            roster: is told of every move.
        """
        self._context = context
        self._place = place
        self._lock = place.lock
        self._group = place.group
        self._member = member
        self._own_round = own_round
        self._exchanges = own_round.exchanges
        self._shared = shared
        self._donor = donor
        self._roster = roster
        self._state_digest: asyncio.Future[str] | None = None
        """The digest of the state at the beginning of the round; it is computed while training goes on."""

    @asynccontextmanager
    async def catching_up(self) -> AsyncIterator[None]:
        """Mark the member as catching up while the block runs: it promises no attempt, and the stage admits less."""
        with self._place.catching_up():
            self._member.set_behind(True)
            try:
                await self._own_round.step_back("this peer is behind its group")
                yield
            finally:
                self._member.set_behind(False)

    async def apply(self, outcome: pb.Outcome) -> None:
        """Apply the prepared result, once. Raises Refused if `outcome` is about another result."""
        await self._to_its_end(self._apply(outcome))

    async def _apply(self, outcome: pb.Outcome) -> Refused | None:
        round_number, digest = outcome.round, outcome.prepared.digest
        async with self._lock:
            try:
                if not self._group.check_commit(round_number, digest):
                    return None
                kept = self._own_round.result
                assert kept is not None
                results.require_norms(outcome, kept.prepared.squared_norm)
            except MalformedMessage as error:
                # The round is decided, so this member may still hear from another one by which norm the result was
                # clipped.
                logger.warning("the commit of round %d is refused: %s", round_number, error)
                return Refused(str(error))
            except Refused as refused:
                return refused
            await self._own_round.stop("the round was committed")
            tensors = dict(kept.round_result.tensors)
            if self._shared.is_due(round_number):
                try:
                    tensors |= await self._shared.sum(round_number, outcome.partners)
                except SwarmError as error:
                    # The round is decided: this member will find itself behind, and catch up.
                    return Refused(str(error))
            outcome.prepared.CopyFrom(kept.prepared)
            self._exchanges.committed(kept.fragment, kept.residual)
            self._own_round.let_go()
            result = dataclasses.replace(
                kept.round_result,
                tensors=tensors,
                total_squared_norm=outcome.total_squared_norm,
                lineage=messages.lineage_after(self._place.standing.lineage, outcome),
                partners=messages.digests_of(outcome.partners),
                cost=dataclasses.replace(
                    kept.round_result.cost,
                    seconds=self._context.clock.monotonic() - kept.began_at,
                    residual_bytes=self._exchanges.residual_bytes,
                ),
            )
            self._state_digest = await self._member.apply(result)
            before = self._place.standing
            self._group.commit(round_number, digest)
            self._place.committed(messages.standing_of(self._member.progress()), outcome)
            self._moved()
            after, digests = self._place.standing, self._state_digest
            self._donor.committed(
                Committed(before=before, after=after, result=result, outcome=outcome, state_digest=digests)
            )
        return None

    async def state_digest(self) -> str:
        """Wait for the digest of the state at the beginning of the round. Some result must have been applied."""
        assert self._state_digest is not None, "a result was applied"
        return await asyncio.shield(self._state_digest)

    async def install(self, snapshot: Snapshot, outcomes: list[pb.Outcome], past: Sequence[str]) -> None:
        """Install a downloaded state. Runs to its end even if the caller is cancelled.

        Args:
            outcomes: how the last rounds before the snapshot were committed.
            past: the lineages of the last rounds before the snapshot, oldest first.

        Raises:
            IntegrityError: the snapshot does not fit this stage.
        """
        await self._to_its_end(self._install(snapshot, outcomes, past))

    async def _install(
        self, snapshot: Snapshot, outcomes: list[pb.Outcome], past: Sequence[str]
    ) -> IntegrityError | None:
        async with self._lock:
            await self._own_round.stop("a newer state was downloaded")
            try:
                await self._member.install(snapshot, carry=self._gave_nothing_until(snapshot, outcomes))
            except IntegrityError as unfit:
                return unfit
            self._exchanges.reset()
            self._donor.jumped()
            self._group.install(snapshot.round)
            self._place.installed(messages.standing_of(self._member.progress()), outcomes, past)
            self._moved()
        return None

    def _gave_nothing_until(self, snapshot: Snapshot, outcomes: list[pb.Outcome]) -> bool:
        """Whether this member contributed nothing to any of the rounds between its own place and the snapshot.

        False where `outcomes` do not tell, because they hold the last rounds only.
        """
        lineage, known = self._place.standing.lineage, {outcome.round: outcome for outcome in outcomes}
        for number in range(self._place.standing.round, snapshot.round):
            outcome = known.get(number)
            if outcome is None or self._context.own_id in outcome.prepared.member_ids:
                return False
            lineage = messages.lineage_after(lineage, outcome)
        return self._place.is_sound and lineage == snapshot.lineage

    async def replay(self, committed: Committed) -> None:
        """Apply a round that the group committed without this member. Does nothing unless the member is where that
        round began.

        Runs to its end even if the caller is cancelled.

        Raises:
            IntegrityError: the result does not fit this stage, or gave another state here than at its members. In the
                second case this member's state is no longer sound.
        """
        await self._to_its_end(self._replay(committed))

    async def _replay(self, committed: Committed) -> IntegrityError | None:
        async with self._lock:
            if committed.before != self._place.standing or not self._place.is_sound:
                return None
            await self._own_round.stop("the round was committed without this member")
            # The contribution is closed as before any commit: nothing may be in flight, and the average must have its
            # shapes.
            contribution = await self._member.close(self._place.standing.round, drop=())
            try:
                await asyncio.to_thread(results.require_applicable, committed.result, contribution.tensors)
            except IntegrityError as wrong:
                self._group.step_back()
                await self._own_round.reopen("a result came that cannot be this round's")
                return wrong
            contributed = self._context.own_id in committed.result.members
            kept = self._own_round.result
            if kept is not None and kept.prepared.digest == committed.result.digest:
                # This member took part in the exchange, and lost touch with the others before the commit.
                self._exchanges.committed(kept.fragment, kept.residual)
            elif contributed:
                # The result has this member's old residual in it; the new one, which that exchange left, is lost.
                self._exchanges.forget(contribution.fragment)
            self._state_digest = await self._member.apply(
                dataclasses.replace(committed.result, contributed=contributed)
            )
            reached = messages.standing_of(self._member.progress())
            ours, theirs = [await asyncio.shield(digest) for digest in (self._state_digest, committed.state_digest)]
            if (ours, reached) != (theirs, committed.after):
                self._place.spoiled()
                self._group.install(committed.before.round)
                self._own_round.end()
                self._donor.jumped()
                return IntegrityError(f"round {committed.before.round} gave another state here than at its members")
            self._group.install(reached.round, last_digest=committed.result.digest)
            self._place.replayed(reached, committed.outcome)
            self._moved()
            self._donor.committed(committed)
        return None

    async def snapshot(self) -> Snapshot:
        """The state at the last committed round."""
        async with self._lock:
            return await self._member.snapshot()

    async def _to_its_end(self, work: Coroutine[Any, Any, Exception | None]) -> None:
        """Wait for work, which goes on even if the caller is cancelled. Raises the error that it returns."""
        error: Exception | None = await asyncio.shield(self._context.tasks.spawn(work))
        if error is not None:
            raise error

    def _moved(self) -> None:
        self._own_round.end()
        self._roster.moved(self._place.standing, self._place.last_members)
        self._context.changes.progressed()
        self._context.changes.notify()
