"""A leader's duties: one attempt at committing a round.

    Begin to all, and again to those that are still closing -> (an earlier result may have been decided: take that) or
    Average to all -> Barrier with the other stages -> Commit to all; or, before anything is decided, Abort to all

Used by averaging/lead_loop, which decides when to try. A result is decided once every member of its exchange
has prepared it; from then on it is never aborted, by no leader. Never touches tensors.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from swarm.averaging import messages
from swarm.averaging.allreduce import OWNER_PATIENCE
from swarm.averaging.barrier import Barrier
from swarm.averaging.blame import SLOW, AttemptFailed, Blame, without_the_useless
from swarm.averaging.broadcast import Broadcast, Members
from swarm.averaging.changes import Changes
from swarm.averaging.context import Context
from swarm.averaging.duplicates import duplicates
from swarm.averaging.group import Ballot
from swarm.averaging.messages import Standing
from swarm.averaging.place import Decision, Place
from swarm.averaging.rules import Begun, unfinished
from swarm.averaging.shared import SharedBlocks
from swarm.averaging.shares import Offer, Shares, divide
from swarm.averaging.transport import ABORT, AVERAGE, BEGIN, COMMIT, contact_of
from swarm.averaging.watch import RoundWatch
from swarm.compression.codec import contribution_codec
from swarm.errors import DeadlineExceeded, MalformedMessage, NotReady, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

_TELL_OF_CLOSING_SECONDS = 10.0


@dataclass
class LeaderTimes:
    """What attempts took, last and in all."""

    average_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_exchange_seconds: float = 0.0
    total_barrier_seconds: float = 0.0
    told_of_closing_at: float = -math.inf
    """When the log said last who is still closing."""


class Leader:
    """Leads the attempts of one stage's group."""

    def __init__(
        self,
        context: Context,
        place: Place,
        *,
        broadcast: Broadcast,
        barrier: Barrier,
        shared: SharedBlocks,
        watch: RoundWatch,
        changes: Changes,
    ) -> None:
        self._context = context
        self._place = place
        self._broadcast = broadcast
        self._barrier = barrier
        self._shared = shared
        self._watch = watch
        self._changes = changes
        self._config = context.config
        self._clock = context.clock
        self._timing = context.timing
        self._codec = contribution_codec(context.config.averaging)
        self._blame = Blame(context.own_id)
        self._vector_bytes = 0
        """Of a contribution in float32, as far as one was exchanged."""
        self.times = LeaderTimes()

    async def attempt(self, members: Members, standing: Standing, number: int) -> None:
        """Try to commit the round among `members`.

        Returns when a result is decided and its commit was sent. Cancellation leaves the members in doubt.

        Raises:
            AttemptFailed: nothing was decided.
        """
        ballot = Ballot(number, self._context.own_id)
        with self._place.leading(ballot):
            try:
                begun = await self._begin(members, standing, ballot)
                prepared = unfinished(begun)
                if prepared is None:
                    prepared = await self._average(members, begun, standing, ballot)
                    holders = list(begun)
                else:
                    logger.info("finishing attempt %d of %s", prepared.ballot.attempt, prepared.ballot.leader_id)
                    holders = [peer for peer, reply in begun.items() if reply.prepared.digest == prepared.digest]
                await self._finish(standing.round, prepared, {peer: members[peer] for peer in holders})
            except AttemptFailed as failed:
                reachable = {peer: record for peer, record in members.items() if peer not in failed.unreachable}
                await self._abort(reachable, standing.round, ballot, failed)
                raise

    # -- first phase -------------------------------------------------------------------------------------------------

    async def _begin(self, members: Members, standing: Standing, ballot: Ballot) -> Begun:
        def request(drop: Collection[int] = ()) -> pb.BeginRequest:
            return pb.BeginRequest(
                address=self._context.address, peer_id=self._context.own_id, ballot=messages.pack_ballot(ballot),
                standing=messages.pack_standing(standing), drop_gaps=messages.pack_indices(drop),
            )  # fmt: skip

        replies = await self._close(members, dict.fromkeys(members, request()))
        begun = {peer: reply for peer, reply in replies.items() if isinstance(reply, pb.BeginReply)}
        refused = {peer: reply.refusal for peer, reply in begun.items() if reply.HasField("refusal")}
        unreached = {peer: reply for peer, reply in replies.items() if isinstance(reply, SwarmError)}
        if refused:
            failed = self._blame.failure("a member refused to begin", unreached)
            failed.refused = set(refused)
            failed.promised_attempt = max(refusal.promised.attempt for refusal in refused.values())
            raise failed
        slow = any(isinstance(error, SLOW) for error in unreached.values())
        if self._blame.is_first_timeout(slow):
            raise self._blame.failure("a member is slow", unreached)
        if not self._watch.has_quorum(begun.keys()):
            raise self._blame.failure("too few members for a quorum", unreached)
        if unfinished(begun) is None:
            if self._config.rounds.synchronous:
                drops = duplicates(begun)
                # What is left they may have to compute again, a microbatch at a time.
                again = await self._close(members, {peer: request(drop) for peer, drop in drops.items()})
                for peer, reply in again.items():
                    if isinstance(reply, SwarmError) or reply.HasField("refusal"):
                        raise self._blame.failure("a member could not drop a duplicate", {peer: reply})
                    begun[peer] = reply
            committed = frozenset[int]().union(*(messages.unpack_indices(r.committed_gaps) for r in begun.values()))
            num_samples = sum(reply.round_samples for reply in begun.values())
            if not self._watch.is_complete(committed, num_samples, begun.keys()):
                failed = self._blame.failure("the round is not complete any more", unreached)
                failed.void = True
                raise failed
            if self._config.rounds.synchronous and num_samples != self._config.rounds.round_samples:
                # Nobody may find out by the weights that something is in a sum and not among the ids, or twice.
                raise self._blame.failure(
                    f"{num_samples} samples were contributed to a round of another size", unreached
                )
        return begun

    async def _close(
        self, members: Members, requests: dict[PeerId, pb.BeginRequest]
    ) -> dict[PeerId, pb.BeginReply | SwarmError]:
        """Have members close, and wait for as long as those that are still at it get on with it."""
        started_at = self._clock.monotonic()
        timeout_seconds = self._blame.deadline(self._timing.begin_seconds, 0.0)
        wait_seconds = min(self._timing.closing_seconds, timeout_seconds / 2)
        for request in requests.values():
            request.wait_seconds = wait_seconds
        answers: dict[PeerId, pb.BeginReply | SwarmError] = {}
        waiting = dict(requests)
        while waiting:
            asked, asked_at = {peer: members[peer] for peer in waiting}, self._clock.monotonic()
            for peer, answer in (await self._broadcast(asked, BEGIN, waiting, timeout_seconds)).items():
                reply = _checked(answer)
                if isinstance(reply, pb.BeginReply) and reply.HasField("closing"):
                    closing, seconds = reply.closing, self._clock.monotonic() - started_at
                    if seconds > self._timing.max_closing_seconds:
                        # It has only its own word that it will ever be done.
                        reply = NotReady(f"it has not closed its contribution in {seconds:.0f} s")
                    elif closing.quiet_seconds <= timeout_seconds + 3 * closing.expected_seconds:
                        continue
                    else:
                        reply = DeadlineExceeded(f"it closes since {seconds:.0f} s, and does not get on with it")
                del waiting[peer]
                answers[peer] = reply
                if isinstance(reply, pb.BeginReply) and reply.HasField("refusal"):
                    # There will be another attempt, which joins what the others have begun.
                    return answers
            if not waiting:
                break
            # Somebody may answer at once that it is still at it.
            await self._clock.sleep(max(0.0, asked_at + wait_seconds - self._clock.monotonic()))
            if self._clock.monotonic() - self.times.told_of_closing_at >= _TELL_OF_CLOSING_SECONDS:
                self.times.told_of_closing_at = self._clock.monotonic()
                logger.info("waits for members that close their contributions: %s", ", ".join(sorted(waiting)))
        return answers

    async def _average(self, members: Members, begun: Begun, standing: Standing, ballot: Ballot) -> pb.Prepared:
        started_at = self._clock.monotonic()
        through_one = self._blame.goes_through_one(standing.round, begun)
        shares = self._shares(begun, only_owner=self._context.own_id if through_one else None)
        self._vector_bytes = 4 * shares.num_elements
        # There and back at every member, at worst all of it over one line.
        num_times = 2 * (len(begun) - 1) if through_one else 4
        num_bytes = num_times * self._codec.num_bytes(shares.num_elements)
        floor = self._timing.average_seconds + num_bytes / self._timing.bytes_per_second
        request = pb.AverageRequest(
            address=self._context.address, peer_id=self._context.own_id, round=standing.round,
            ballot=messages.pack_ballot(ballot),
            shares=[
                pb.Share(
                    contact=contact_of(members[PeerId(share.peer_id)]), num_samples=share.num_samples,
                    round_samples=share.round_samples, weight=share.weight, num_elements=share.num_elements,
                )
                for share in shares.members
            ],
            timeout_seconds=self._blame.deadline(floor, self.times.average_seconds),
        )  # fmt: skip
        replies = await self._broadcast(
            {peer: members[peer] for peer in begun}, AVERAGE, dict.fromkeys(begun, request),
            request.timeout_seconds + self._timing.grace_seconds, until=_is_prepared,
        )  # fmt: skip
        results = [reply.prepared for reply in replies.values() if isinstance(reply, pb.AverageReply)]
        digests = {prepared.digest for prepared in results}
        if len(results) < len(begun) or "" in digests:
            took_long = self._clock.monotonic() - started_at >= OWNER_PATIENCE * request.timeout_seconds
            raise self._blame.failed_exchange(replies, begun.keys(), standing.round, ballot, took_long=took_long)
        if len(digests) > 1:
            raise AttemptFailed("members came to different results")
        self.times.average_seconds = self._clock.monotonic() - started_at
        self.times.total_exchange_seconds += self.times.average_seconds
        self._blame.exchanged()
        return results[0]

    def _shares(self, begun: Begun, only_owner: str | None) -> Shares:
        """Who exchanges with which weight; raises AttemptFailed if a contribution is of no use."""
        sizes = Counter(reply.num_elements for reply in begun.values())
        own = begun.get(self._context.own_id)
        size = own.num_elements if own is not None else sizes.most_common(1)[0][0]
        if (failed := without_the_useless(begun, size)) is not None:
            raise failed
        offers = [
            Offer(
                peer_id=peer, num_samples=reply.num_samples, round_samples=reply.round_samples, norm=reply.norm,
                bytes_per_second=reply.bytes_per_second,
            )
            for peer, reply in sorted(begun.items())
        ]  # fmt: skip
        # Clipped, the gradients would not add up to that of a single process.
        clip_to_median = 0.0 if self._config.rounds.synchronous else self._config.averaging.clip_to_median
        return divide(
            offers, num_elements=size, tile=self._codec.tile, clip_to_median=clip_to_median, only_owner=only_owner
        )

    async def _abort(self, members: Members, round_number: int, ballot: Ballot, failed: AttemptFailed) -> None:
        request = pb.AbortRequest(
            address=self._context.address,
            peer_id=self._context.own_id,
            round=round_number,
            ballot=messages.pack_ballot(ballot),
            reason=str(failed),
            void=failed.void,
        )
        await self._broadcast(members, ABORT, dict.fromkeys(members, request), self._timing.begin_seconds)

    # -- second phase ------------------------------------------------------------------------------------------------

    async def _finish(self, round_number: int, prepared: pb.Prepared, holders: Members) -> None:
        """Commit what is decided, once the stages that have to be waited for have decided theirs."""
        started_at = self._clock.monotonic()
        stage = self._context.own.stage
        norm = prepared.squared_norm
        partners = self._shared.partners(round_number)
        shares = [pb.Partner(stage=stage, digest=prepared.digest, contact=contact_of(next(iter(holders.values()))))]
        ready: dict[int, pb.BarrierReply] = {}

        async def wait_for(stages: Collection[int]) -> bool:
            replies = await self._barrier.wait_for(stages, round_number)
            ready.update(replies or {})
            return replies is not None

        if self._shared.counts_norm(round_number):
            # The others need this stage's norm, and that needs the partners' averages: these decide without us.
            if not await wait_for(partners):
                return
            norm += await self._shared.squared_norm_of_sum(round_number, [*shares, *_partners(ready, partners)])
        self._place.decide(Decision(round=round_number, prepared=prepared, squared_norm=norm))
        self._changes.signal()
        others = set(range(self._config.stages.num_stages)) - {stage} if self._config.rounds.synchronous else partners
        if not await wait_for(others - ready.keys()):
            return
        self.times.total_barrier_seconds += self._clock.monotonic() - started_at
        norms = {stage: norm} | {other: reply.squared_norm for other, reply in ready.items()}
        # In the same order at every stage, and not by `sum`, which some releases of Python round otherwise, so that the
        # total is the same bits.
        total_squared_norm = 0.0
        for number in sorted(norms):
            total_squared_norm += norms[number]
        request = pb.CommitRequest(
            address=self._context.address, peer_id=self._context.own_id, round=round_number, digest=prepared.digest,
            total_squared_norm=total_squared_norm, stage_squared_norm=norm,
            partners=[*shares, *_partners(ready, partners)] if partners else [],
        )  # fmt: skip
        await self._commit(holders, request)

    async def _commit(self, holders: Members, request: pb.CommitRequest) -> None:
        started_at = self._clock.monotonic()
        floor = self._timing.commit_seconds + self._vector_bytes / self._timing.work_bytes_per_second
        timeout_seconds = self._blame.deadline(floor, self.times.commit_seconds)
        replies = await self._broadcast(holders, COMMIT, dict.fromkeys(holders, request), timeout_seconds)
        if not any(isinstance(reply, SLOW) for reply in replies.values()):
            # What a deadline has cut off says nothing; the deadlines that followed from it would grow round by round.
            self.times.commit_seconds = self._clock.monotonic() - started_at
        digests: dict[str, list[PeerId]] = {}
        for peer, reply in replies.items():
            if isinstance(reply, SwarmError):
                # It finds out from anybody's answer to its next report.
                logger.warning("the commit did not reach %s: %s", peer, reply)
            elif not reply.HasField("refusal"):
                digests.setdefault(reply.state_digest, []).append(peer)
        if len(digests) > 1:
            logger.error("members differ after the same round %d: %s", request.round, digests)


def _checked(reply: pb.BeginReply | SwarmError) -> pb.BeginReply | SwarmError:
    """An answer, or that it makes no sense."""
    if isinstance(reply, SwarmError) or reply.HasField("refusal") or reply.HasField("closing"):
        return reply
    try:
        messages.unpack_indices(reply.committed_gaps)
        messages.require_ballot(reply.since)
        if reply.HasField("prepared"):
            messages.require_ballot(reply.prepared.ballot)
    except MalformedMessage as error:
        return error
    return reply


def _is_prepared(reply: Any) -> bool:
    return isinstance(reply, pb.AverageReply) and reply.HasField("prepared")


def _partners(ready: Mapping[int, pb.BarrierReply], stages: Collection[int]) -> list[pb.Partner]:
    return [pb.Partner(stage=s, digest=ready[s].digest, contact=ready[s].leader) for s in sorted(stages)]
