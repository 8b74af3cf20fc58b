"""A leader's duties: it watches the round, and makes attempts to commit it.

    Begin to all, and again to those that are still closing
    -> Average to all -> Barrier with the other stages -> Commit to all

If an earlier result may have been decided, Average is left out and that result is committed. If the attempt fails
before a result is decided, Abort goes to all. A result is decided once every member of its exchange has prepared it;
from then on no leader ever aborts it. Never touches tensors.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.blame import SLOW, AttemptFailed, Blame
from swarm.averaging.agreement.group import Ballot
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.place import Decision, Place
from swarm.averaging.agreement.rules import Begun, agreed, unfinished
from swarm.averaging.agreement.shares import Shares, clip_of, divide
from swarm.averaging.barrier import Barrier
from swarm.averaging.beginning import Beginning
from swarm.averaging.own_round import OwnRound
from swarm.averaging.reporter import Reporter
from swarm.averaging.roster import Roster
from swarm.averaging.vectors.allreduce import OWNER_PATIENCE
from swarm.averaging.vectors.shared import SharedBlocks
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import ABORT, AVERAGE, COMMIT, Broadcast, Members, contact_of
from swarm.compression.codec import Codec, contribution_codec
from swarm.errors import MalformedMessage, SwarmError
from swarm.machine.clock import wait
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MOST_COMMITS = 4
"""A result that was to be committed so often is none: its holders would have committed it, and moved on."""
MOST_AHEAD = 1000
"""The most by which an attempt's number follows what a member says it has promised. Numbers are bounded, and one that
is used cannot be undone."""
_REST_PER_LOOK = 4.0
"""The pause between two looks at the round, as a multiple of the time that a look takes. It leaves time for other work
of the event loop."""


@dataclass(eq=False)
class Leader:
    """Leads the attempts of one stage's group."""

    context: Context
    place: Place
    beginning: Beginning
    broadcast: Broadcast
    barrier: Barrier
    shared: SharedBlocks
    blame: Blame
    _num_commits: Counter[tuple[int, str]] = field(default_factory=Counter, init=False)
    """How often the commit of a round's result was sent, by round and digest."""
    _vector_bytes: int = field(default=0, init=False)
    """The size of a contribution in float32, once one was exchanged."""
    _average_seconds: float = field(default=0.0, init=False)
    """How long the last exchange took."""
    _commit_seconds: float = field(default=0.0, init=False)
    """How long the last commit took."""

    @cached_property
    def _codec(self) -> Codec:
        return contribution_codec(self.context.config.averaging)

    async def attempt(self, members: Members, standing: Standing, number: int) -> None:
        """Try to commit the round among `members`.

        Returns when a result is decided and its commit was sent. After a cancellation, members do not know how the
        attempt ends.

        Raises:
            AttemptFailed: nothing was decided.
        """
        ballot = Ballot(number, self.context.own_id)
        with self.place.leading(ballot):
            try:
                begun = await self.beginning.of(members, standing, ballot)
                prepared = unfinished(begun)
                if prepared is None:
                    prepared = await self._average(members, begun, standing, ballot)
                    holders = list(begun)
                else:
                    logger.info("finishing attempt %d of %s", prepared.ballot.attempt, prepared.ballot.leader_id)
                    holders = [peer for peer, reply in begun.items() if reply.prepared.digest == prepared.digest]
                    if self._num_commits[standing.round, prepared.digest] >= MOST_COMMITS:
                        raise self.blame.uncommitted(holders)
                await self._finish(standing.round, prepared, {peer: members[peer] for peer in holders})
            except AttemptFailed as failed:
                reachable = {peer: record for peer, record in members.items() if peer not in failed.unreachable}
                await self._abort(reachable, standing.round, ballot, failed)
                raise

    # -- before anything is decided ----------------------------------------------------------------------------------

    async def _average(self, members: Members, begun: Begun, standing: Standing, ballot: Ballot) -> pb.Prepared:
        started_at = self.context.clock.monotonic()
        through_one = self.blame.goes_through_one(standing.round, begun)
        shares = self._shares(begun, only_owner=self.context.own_id if through_one else None)
        self._vector_bytes = 4 * shares.num_elements
        # Every member sends the whole vector and gets it back. At worst all of that goes over one line.
        num_times = 2 * (len(begun) - 1) if through_one else 4
        num_bytes = num_times * self._codec.num_bytes(shares.num_elements)
        floor = self.context.timing.average_seconds + num_bytes / self.context.timing.bytes_per_second
        request = pb.AverageRequest(
            address=self.context.address,
            peer_id=self.context.own_id,
            round=standing.round,
            ballot=messages.pack_ballot(ballot),
            shares=[
                pb.Share(
                    contact=contact_of(members[PeerId(share.peer_id)]),
                    num_samples=share.counts.num_samples,
                    num_targets=share.counts.num_targets,
                    round_samples=share.counts.round_samples,
                    norm=share.counts.norm,
                    num_elements=share.num_elements,
                )
                for share in shares.members
            ],
            timeout_seconds=self.blame.deadline(floor, self._average_seconds),
        )
        replies = await self.broadcast(
            {peer: members[peer] for peer in begun},
            AVERAGE,
            dict.fromkeys(begun, request),
            request.timeout_seconds + self.context.timing.grace_seconds,
            until=_is_prepared,
        )
        replies = {peer: _checked(reply) for peer, reply in replies.items()}
        results = {peer: reply.prepared for peer, reply in replies.items() if isinstance(reply, pb.AverageReply)}
        digests = {peer: prepared.digest for peer, prepared in results.items()}
        if len(results) < len(begun) or "" in digests.values():
            took_long = self.context.clock.monotonic() - started_at >= OWNER_PATIENCE * request.timeout_seconds
            raise self.blame.failed_exchange(replies, begun.keys(), standing.round, ballot, took_long=took_long)
        if len(set(digests.values())) > 1:
            raise self.blame.different_results(digests)
        self._average_seconds = self.context.clock.monotonic() - started_at
        self.blame.exchanged(begun.keys())
        return agreed(results, self.context.own_id)

    def _shares(self, begun: Begun, only_owner: str | None) -> Shares:
        """Each member's weight and part in the exchange."""
        return divide(
            {peer: begun[peer] for peer in sorted(begun)},
            num_elements=next(iter(begun.values())).num_elements,
            tile=self._codec.tile,
            clip_to_median=clip_of(self.context.config),
            only_owner=only_owner,
        )

    async def _abort(self, members: Members, round_number: int, ballot: Ballot, failed: AttemptFailed) -> None:
        request = pb.AbortRequest(
            address=self.context.address,
            peer_id=self.context.own_id,
            round=round_number,
            ballot=messages.pack_ballot(ballot),
            reason=str(failed),
            void=failed.void,
        )
        await self.broadcast(members, ABORT, dict.fromkeys(members, request), self.context.timing.begin_seconds)

    # -- once a result is decided --------------------------------------------------------------------------------------

    async def _finish(self, round_number: int, prepared: pb.Prepared, holders: Members) -> None:
        """Commit the decided result, once the stages that it waits for have decided theirs."""
        stage = self.context.own.stage
        norm = prepared.squared_norm
        partners = self.shared.partners(round_number)
        shares = [pb.Partner(stage=stage, digest=prepared.digest, contact=contact_of(next(iter(holders.values()))))]
        ready: dict[int, pb.BarrierReply] = {}

        async def wait_for(stages: Collection[int]) -> bool:
            replies = await self.barrier.wait_for(stages, round_number)
            ready.update(replies or {})
            return replies is not None

        if self.shared.counts_norm(stage, round_number):
            # The other stages need this stage's norm, which depends on the partners' averages. So the partners are
            # awaited first: they decide without waiting for this stage.
            if not await wait_for(partners):
                return
            norm += await self.shared.squared_norm_of_sum(round_number, [*shares, *_partners(ready, partners)])
        self.place.decide(Decision(round=round_number, prepared=prepared, squared_norm=norm))
        self.context.changes.signal()
        if not await wait_for(self.barrier.awaited(round_number) - ready.keys()):
            return
        norms = {stage: norm} | {other: reply.squared_norm for other, reply in ready.items()}
        # Added one by one and in the same order at every stage, so that the total has the same bits. `sum` rounds
        # differently in some releases of Python.
        total_squared_norm = 0.0
        for number in sorted(norms):
            total_squared_norm += norms[number]
        request = pb.CommitRequest(
            address=self.context.address,
            peer_id=self.context.own_id,
            round=round_number,
            digest=prepared.digest,
            total_squared_norm=total_squared_norm,
            stage_squared_norm=norm,
            partners=[*shares, *_partners(ready, partners)] if partners else [],
        )
        await self._commit(holders, request)

    async def _commit(self, holders: Members, request: pb.CommitRequest) -> None:
        started_at, key = self.context.clock.monotonic(), (request.round, request.digest)
        self._num_commits = Counter({key: self._num_commits[key] + 1})
        floor = self.context.timing.commit_seconds + self._vector_bytes / self.context.timing.work_bytes_per_second
        timeout_seconds = self.blame.deadline(floor, self._commit_seconds)
        replies = await self.broadcast(holders, COMMIT, dict.fromkeys(holders, request), timeout_seconds)
        if not any(isinstance(reply, SLOW) for reply in replies.values()):
            # Not measured if a deadline cut the call off: deadlines that depend on such a time would grow each round.
            self._commit_seconds = self.context.clock.monotonic() - started_at
        digests: dict[str, list[PeerId]] = {}
        for peer, reply in replies.items():
            if isinstance(reply, SwarmError):
                # The member learns of the commit from any answer to its next report.
                logger.warning("the commit did not reach %s: %s", peer, reply)
            elif not reply.HasField("refusal"):
                digests.setdefault(reply.state_digest, []).append(peer)
        if len(digests) > 1:
            logger.error("members differ after the same round %d: %s", request.round, digests)


def _checked(reply: pb.AverageReply | SwarmError) -> pb.AverageReply | SwarmError:
    """Return a member's answer, or MalformedMessage if the answer says nothing, or names an impossible result."""
    if isinstance(reply, SwarmError) or reply.HasField("refusal") or reply.HasField("failure"):
        return reply
    if not (reply.prepared.digest and 0.0 <= reply.prepared.squared_norm < math.inf):
        return MalformedMessage("its answer names no result that can be")
    return reply


def _is_prepared(reply: Any) -> bool:
    return isinstance(reply, pb.AverageReply) and reply.HasField("prepared")


def _partners(ready: Mapping[int, pb.BarrierReply], stages: Collection[int]) -> list[pb.Partner]:
    return [pb.Partner(stage=s, digest=ready[s].digest, contact=ready[s].leader) for s in sorted(stages)]


@dataclass(eq=False)
class LeadLoop:
    """The attempts that one peer leads."""

    context: Context
    place: Place
    roster: Roster
    own_round: OwnRound
    reporter: Reporter
    watch: RoundWatch
    leader: Leader
    num_attempts: int = field(default=0, init=False)
    aborted: Counter[str] = field(default_factory=Counter, init=False)
    """The number of failed attempts, by reason."""
    _attempts: Counter[int] = field(default_factory=Counter, init=False)
    """The number of the last attempt, by round."""

    async def run(self) -> None:
        """Lead whenever it is this peer's turn, until cancelled. After a cancellation, members do not know how a
        running attempt ends."""
        clock, timing = self.context.clock, self.context.timing
        num_failures = 0
        await wait(self.context.changes.next, timing.heartbeat_seconds)
        while True:
            changed, looked_at = self.context.changes.next, clock.monotonic()
            if not self.watch.may_begin():
                # In a large group reports come faster than the round can be looked at.
                rest_seconds = _REST_PER_LOOK * (clock.monotonic() - looked_at)
                await clock.sleep(min(timing.heartbeat_seconds, rest_seconds))
                await wait(changed, timing.heartbeat_seconds)
            elif await self._attempt():
                num_failures = 0
            else:
                num_failures += 1
                backoff = timing.retry_seconds * 2 ** (num_failures - 2) if num_failures > 1 else 0.0
                await clock.sleep(min(timing.max_retry_seconds, backoff))

    async def _attempt(self) -> bool:
        """Try to commit the round. Returns whether this peer has moved on."""
        standing, promised = self.place.standing, self.place.group.promised
        number = max(self._attempts[standing.round], promised.attempt if promised else 0) + 1
        self._attempts = Counter({standing.round: number})
        self.num_attempts += 1
        ballot = Ballot(number, self.context.own_id)
        members = self.roster.contacts.records(self.watch.view().progress)
        if not self.roster.excludes_self:
            members[self.context.own_id] = self.context.present
        try:
            await self.leader.attempt(members, standing, number)
            # The result may be decided, though it was not committed here. Then the next attempt finishes it.
            await self.own_round.step_back("it was decided, and not committed here", only=ballot)
            if self.place.standing != standing:
                for peer_id in members.keys() - set(self.place.last_members):
                    self.roster.suspicions.failed(peer_id)
        except AttemptFailed as failed:
            logger.info("attempt %d at round %d failed: %s", number, standing.round, failed)
            self.aborted[str(failed)] += 1
            # A member's promise is no more than its word, and numbers have a bound.
            self._attempts[standing.round] = max(number, min(failed.promised_attempt, number + MOST_AHEAD))
            await self._learn_from(failed)
            return False
        except SwarmError as error:
            # For example, no peer of another stage sends its average of a shared block. That stage may still decide
            # anew.
            logger.warning("round %d cannot be committed yet: %s", standing.round, error)
            await self.own_round.step_back("what it takes to commit cannot be had", only=ballot)
            return False
        finally:
            self.context.changes.notify()
        return self.place.standing != standing

    async def _learn_from(self, failed: AttemptFailed) -> None:
        for peer_id in failed.unreachable:
            self.roster.suspect(peer_id)
        for peer_id in failed.excluded:
            self.roster.suspicions.exclude(peer_id)
        for peer_id in failed.refused:
            self.roster.forget_report(peer_id)
        self.context.changes.signal()
        if failed.refused:
            # Peers that refused may be at a later round. If this peer did not ask, it would go on alone.
            await self.reporter.ask_all()
