"""A leader's duties: one attempt at committing a round.

    Begin to all, and again to those that are still closing -> (an earlier result may have been decided: take that) or
    Average to all -> Barrier with the other stages -> Commit to all; or, before anything is decided, Abort to all

Used by averaging/averager, which decides when to try. A result is decided once every member of its exchange
has prepared it; from then on it is never aborted, by no leader. Never touches tensors.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.averaging import messages
from swarm.averaging.allreduce import OWNER_PATIENCE
from swarm.averaging.barrier import Barrier
from swarm.averaging.broadcast import Broadcast, Members
from swarm.averaging.completion import Completion
from swarm.averaging.duplicates import duplicates
from swarm.averaging.group import Ballot
from swarm.averaging.messages import Standing
from swarm.averaging.shared import SharedBlocks
from swarm.averaging.shares import Offer, Shares, divide
from swarm.averaging.timing import Timing
from swarm.averaging.transport import ABORT, AVERAGE, BEGIN, COMMIT, contact_of
from swarm.averaging.unfinished import Begun, unfinished
from swarm.compression.codec import Codec, contribution_codec
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded, MalformedMessage, NotReady, Overloaded, PeerUnavailable, SwarmError
from swarm.machine.clock import Clock
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MOST_THROUGH_ONE = 8
"""Members of whom one may sum everything, for want of lines between the others: it carries all that they send."""
_TELL_OF_CLOSING_SECONDS = 10.0
SLOW = DeadlineExceeded, Overloaded
"""Of these errors, the first ones only double the deadlines."""


class AttemptFailed(Exception):
    """Nothing was decided; the attempt is aborted. Does not leave this package."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.unreachable: set[PeerId] = set()
        self.excluded: set[PeerId] = set()
        """Alive, yet attempts fail because of them."""
        self.refused: set[PeerId] = set()
        self.promised_attempt = 0
        self.void = False
        """Results of earlier attempts were not decided and never will be."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A result that will be committed, whatever happens."""

    round: int
    prepared: pb.Prepared
    squared_norm: float
    """Of the stage's gradient, with the shared blocks that are counted here."""


@dataclass
class LeaderTimes:
    """What attempts took, last and in all."""

    average_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_exchange_seconds: float = 0.0
    total_barrier_seconds: float = 0.0
    num_timeouts: int = 0
    """In a row; every one doubles the deadlines, up to 8 times."""
    told_of_closing_at: float = -math.inf
    """When the log said last who is still closing."""


@dataclass(eq=False)
class Leader:
    """Leads the attempts of one stage's group."""

    config: RunConfig
    own_id: PeerId
    address: Address
    broadcast: Broadcast
    barrier: Barrier
    shared: SharedBlocks
    is_complete: Completion
    absent_samples: Callable[[Collection[PeerId]], int]
    """Samples of the round at living members that are not among these."""
    has_quorum: Callable[[Collection[str]], bool]
    clock: Clock
    timing: Timing
    active: Ballot | None = None
    """The attempt under way."""
    decision: Decision | None = None
    """What it came to, until it is committed."""
    decided: Callable[[], None] = lambda: None
    round_through_one: int | None = None
    """The round in which a line between two members failed: they exchange through this peer alone."""
    vector_bytes: int = 0
    """Of a contribution in float32, as far as one was exchanged."""
    times: LeaderTimes = field(default_factory=LeaderTimes)
    codec: Codec = field(init=False)

    def __post_init__(self) -> None:
        self.codec = contribution_codec(self.config.averaging)

    async def attempt(self, members: Members, standing: Standing, number: int) -> None:
        """Try to commit the round among `members`.

        Returns when a result is decided and its commit was sent. Cancellation leaves the members in doubt.

        Raises:
            AttemptFailed: nothing was decided.
        """
        self.active = Ballot(number, self.own_id)
        try:
            begun = await self._begin(members, standing, self.active)
            prepared = unfinished(begun)
            if prepared is None:
                prepared = await self._average(members, begun, standing, self.active)
                holders = list(begun)
            else:
                logger.info("finishing attempt %d of %s", prepared.ballot.attempt, prepared.ballot.leader_id)
                holders = [peer for peer, reply in begun.items() if reply.prepared.digest == prepared.digest]
            await self._finish(standing.round, prepared, {peer: members[peer] for peer in holders})
        except AttemptFailed as failed:
            reachable = {peer: record for peer, record in members.items() if peer not in failed.unreachable}
            await self._abort(reachable, standing.round, self.active, failed)
            raise
        finally:
            self.active = self.decision = None

    # -- first phase -------------------------------------------------------------------------------------------------

    async def _begin(self, members: Members, standing: Standing, ballot: Ballot) -> Begun:
        def request(drop: Collection[int] = ()) -> pb.BeginRequest:
            return pb.BeginRequest(
                address=self.address, peer_id=self.own_id, ballot=messages.pack_ballot(ballot),
                standing=messages.pack_standing(standing), drop_gaps=messages.pack_indices(drop),
            )  # fmt: skip

        replies = await self._close(members, dict.fromkeys(members, request()))
        begun = {peer: reply for peer, reply in replies.items() if isinstance(reply, pb.BeginReply)}
        refused = {peer: reply.refusal for peer, reply in begun.items() if reply.HasField("refusal")}
        unreached = {peer: reply for peer, reply in replies.items() if isinstance(reply, SwarmError)}
        if refused:
            failed = self._failure("a member refused to begin", unreached)
            failed.refused = set(refused)
            failed.promised_attempt = max(refusal.promised.attempt for refusal in refused.values())
            raise failed
        slow = any(isinstance(error, SLOW) for error in unreached.values())
        if self._is_first_timeout(slow):
            raise self._failure("a member is slow", unreached)
        if not self.has_quorum(begun.keys()):
            raise self._failure("too few members for a quorum", unreached)
        if unfinished(begun) is None:
            if self.config.rounds.synchronous:
                drops = duplicates(begun)
                # What is left they may have to compute again, a microbatch at a time.
                again = await self._close(members, {peer: request(drop) for peer, drop in drops.items()})
                for peer, reply in again.items():
                    if isinstance(reply, SwarmError) or reply.HasField("refusal"):
                        raise self._failure("a member could not drop a duplicate", {peer: reply})
                    begun[peer] = reply
            committed = frozenset[int]().union(*(messages.unpack_indices(r.committed_gaps) for r in begun.values()))
            num_samples = sum(reply.round_samples for reply in begun.values())
            absent_samples = self.absent_samples(begun.keys())
            if not self.is_complete(standing.round, committed, num_samples, absent_samples):
                failed = self._failure("the round is not complete any more", unreached)
                failed.void = True
                raise failed
            if self.config.rounds.synchronous and num_samples != self.config.rounds.round_samples:
                # Nobody may find out by the weights that something is in a sum and not among the ids, or twice.
                raise self._failure(f"{num_samples} samples were contributed to a round of another size", unreached)
        return begun

    async def _close(
        self, members: Members, requests: dict[PeerId, pb.BeginRequest]
    ) -> dict[PeerId, pb.BeginReply | SwarmError]:
        """Have members close, and wait for as long as those that are still at it get on with it."""
        started_at = self.clock.monotonic()
        timeout_seconds = self._deadline(self.timing.begin_seconds, 0.0)
        wait_seconds = min(self.timing.closing_seconds, timeout_seconds / 2)
        for request in requests.values():
            request.wait_seconds = wait_seconds
        answers: dict[PeerId, pb.BeginReply | SwarmError] = {}
        waiting = dict(requests)
        while waiting:
            asked, asked_at = {peer: members[peer] for peer in waiting}, self.clock.monotonic()
            for peer, answer in (await self.broadcast(asked, BEGIN, waiting, timeout_seconds)).items():
                reply = _checked(answer)
                if isinstance(reply, pb.BeginReply) and reply.HasField("closing"):
                    closing, seconds = reply.closing, self.clock.monotonic() - started_at
                    if seconds > self.timing.max_closing_seconds:
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
            await self.clock.sleep(max(0.0, asked_at + wait_seconds - self.clock.monotonic()))
            if self.clock.monotonic() - self.times.told_of_closing_at >= _TELL_OF_CLOSING_SECONDS:
                self.times.told_of_closing_at = self.clock.monotonic()
                logger.info("waits for members that close their contributions: %s", ", ".join(sorted(waiting)))
        return answers

    async def _average(self, members: Members, begun: Begun, standing: Standing, ballot: Ballot) -> pb.Prepared:
        started_at = self.clock.monotonic()
        through_one = standing.round == self.round_through_one and self._can_sum_all(begun)
        shares = self._shares(begun, only_owner=self.own_id if through_one else None)
        self.vector_bytes = 4 * shares.num_elements
        # There and back at every member, at worst all of it over one line.
        num_times = 2 * (len(begun) - 1) if through_one else 4
        num_bytes = num_times * self.codec.num_bytes(shares.num_elements)
        floor = self.timing.average_seconds + num_bytes / self.timing.bytes_per_second
        request = pb.AverageRequest(
            address=self.address, peer_id=self.own_id, round=standing.round, ballot=messages.pack_ballot(ballot),
            shares=[
                pb.Share(
                    contact=contact_of(members[PeerId(share.peer_id)]), num_samples=share.num_samples,
                    round_samples=share.round_samples, weight=share.weight, num_elements=share.num_elements,
                )
                for share in shares.members
            ],
            timeout_seconds=self._deadline(floor, self.times.average_seconds),
        )  # fmt: skip
        replies = await self.broadcast(
            {peer: members[peer] for peer in begun}, AVERAGE, dict.fromkeys(begun, request),
            request.timeout_seconds + self.timing.grace_seconds, until=_is_prepared,
        )  # fmt: skip
        results = [reply.prepared for reply in replies.values() if isinstance(reply, pb.AverageReply)]
        digests = {prepared.digest for prepared in results}
        if len(results) < len(begun) or "" in digests:
            took_long = self.clock.monotonic() - started_at >= OWNER_PATIENCE * request.timeout_seconds
            raise self._blame(replies, begun.keys(), standing.round, took_long)
        if len(digests) > 1:
            raise AttemptFailed("members came to different results")
        self.times.average_seconds = self.clock.monotonic() - started_at
        self.times.total_exchange_seconds += self.times.average_seconds
        self.times.num_timeouts = 0
        return results[0]

    def _can_sum_all(self, members: Collection[PeerId]) -> bool:
        return self.own_id in members and 2 < len(members) <= MOST_THROUGH_ONE

    def _shares(self, begun: Begun, only_owner: str | None) -> Shares:
        """Who exchanges with which weight; raises AttemptFailed if a contribution is of no use."""
        sizes = Counter(reply.num_elements for reply in begun.values())
        size = begun[self.own_id].num_elements if self.own_id in begun else sizes.most_common(1)[0][0]
        useless = {
            peer: fault
            for peer, reply in begun.items()
            for fault, is_so in (
                ("not finite", not math.isfinite(reply.norm)),
                ("of a norm below zero", reply.norm < 0.0),
                ("of another size", reply.num_elements != size),
                ("of no samples, and some count towards the round", reply.num_samples == 0 < reply.round_samples),
            )
            if is_so
        }
        if useless:
            failed = AttemptFailed("a contribution is of no use")
            failed.excluded = set(useless)
            for peer, fault in sorted(useless.items()):
                logger.warning("%s is left out: its contribution is %s", peer, fault)
            raise failed
        offers = [
            Offer(
                peer_id=peer, num_samples=reply.num_samples, round_samples=reply.round_samples, norm=reply.norm,
                bytes_per_second=reply.bytes_per_second,
            )
            for peer, reply in sorted(begun.items())
        ]  # fmt: skip
        # Clipped, the gradients would not add up to that of a single process.
        clip_to_median = 0.0 if self.config.rounds.synchronous else self.config.averaging.clip_to_median
        return divide(
            offers, num_elements=size, tile=self.codec.tile, clip_to_median=clip_to_median, only_owner=only_owner
        )

    def _blame(
        self, replies: Mapping[PeerId, Any], members: Collection[PeerId], round_number: int, took_long: bool
    ) -> AttemptFailed:  # fmt: skip
        # By who noticed; others were told, and pass it on.
        accusations = {
            PeerId(reply.failure.noticed_by_id): reply.failure
            for reply in replies.values()
            if isinstance(reply, pb.AverageReply) and reply.HasField("failure")
        }
        is_explained = bool(accusations) or any(isinstance(reply, PeerUnavailable) for reply in replies.values())
        is_first = self._is_first_timeout(took_long or not is_explained)
        failed = self._failure("the exchange failed", replies)
        if not (is_explained or is_first or took_long):
            # Twice in a row is no accident. Once it took long, the others are no wiser than these.
            failed.excluded |= self._refusing(replies)
        if failed.unreachable or failed.excluded or is_first or not accusations:
            return failed
        counts = Counter(PeerId(failure.blamed_id) for failure in accusations.values())
        blamed, _ = counts.most_common(1)[0]
        accusers = {accuser: failure for accuser, failure in accusations.items() if failure.blamed_id == blamed}
        logger.warning("the exchange failed because of %s: %s", blamed, next(iter(accusers.values())).reason)
        if self._can_sum_all(members) and self.own_id not in counts.keys() | accusations.keys():
            # It is a line between others, and all of them have just answered this peer: nobody need be left out.
            self.round_through_one = round_number
            return failed
        # A single member that cannot reach its leader is cut off itself; the leader knows its own faults best.
        is_cut_off = blamed == self.own_id and self.own_id not in accusers
        failed.excluded = set(accusers) if is_cut_off else {blamed}
        return failed

    def _refusing(self, replies: Mapping[PeerId, Any]) -> set[PeerId]:
        """Members that refuse this very attempt, though they have promised no other since."""
        promised = messages.pack_ballot(self.active)
        return {
            peer
            for peer, reply in replies.items()
            if isinstance(reply, pb.AverageReply) and reply.HasField("refusal") and reply.refusal.promised == promised
        }

    def _failure(self, reason: str, replies: Mapping[PeerId, Any]) -> AttemptFailed:
        """That nothing is decided, and who will be left out of the next attempt.

        Whoever answered with an error of its own would answer so again; from the second time-out in a row on the same
        goes for whoever is slow. Both are alive and go on reporting: the stage would wait for them for good.
        """
        failed = AttemptFailed(reason)
        for peer, reply in replies.items():
            if isinstance(reply, PeerUnavailable) and reply.is_unreachable:
                failed.unreachable.add(peer)
            elif isinstance(reply, SLOW):
                if self.times.num_timeouts > 1:
                    failed.excluded.add(peer)
            elif isinstance(reply, SwarmError):
                failed.excluded.add(peer)
        if failed.excluded:
            logger.warning("left out, since it failed or is slow: %s", ", ".join(sorted(failed.excluded)))
        return failed

    async def _abort(self, members: Members, round_number: int, ballot: Ballot, failed: AttemptFailed) -> None:
        request = pb.AbortRequest(
            address=self.address, peer_id=self.own_id, round=round_number, ballot=messages.pack_ballot(ballot),
            reason=str(failed), void=failed.void,
        )  # fmt: skip
        await self.broadcast(members, ABORT, dict.fromkeys(members, request), self.timing.begin_seconds)

    # -- second phase ------------------------------------------------------------------------------------------------

    async def _finish(self, round_number: int, prepared: pb.Prepared, holders: Members) -> None:
        """Commit what is decided, once the stages that have to be waited for have decided theirs."""
        started_at = self.clock.monotonic()
        stage = self.address.stage
        norm = prepared.squared_norm
        partners = self.shared.partners(round_number)
        shares = [pb.Partner(stage=stage, digest=prepared.digest, contact=contact_of(next(iter(holders.values()))))]
        ready: dict[int, pb.BarrierReply] = {}

        async def wait_for(stages: Collection[int]) -> bool:
            replies = await self.barrier.wait_for(stages, round_number)
            ready.update(replies or {})
            return replies is not None

        if self.shared.counts_norm(round_number):
            # The others need this stage's norm, and that needs the partners' averages: these decide without us.
            if not await wait_for(partners):
                return
            norm += await self.shared.squared_norm_of_sum(round_number, [*shares, *_partners(ready, partners)])
        self.decision = Decision(round=round_number, prepared=prepared, squared_norm=norm)
        self.decided()
        others = set(range(self.config.stages.num_stages)) - {stage} if self.config.rounds.synchronous else partners
        if not await wait_for(others - ready.keys()):
            return
        self.times.total_barrier_seconds += self.clock.monotonic() - started_at
        norms = {stage: norm} | {other: reply.squared_norm for other, reply in ready.items()}
        # In the same order at every stage, and not by `sum`, which some releases of Python round otherwise, so that the
        # total is the same bits.
        total_squared_norm = 0.0
        for number in sorted(norms):
            total_squared_norm += norms[number]
        request = pb.CommitRequest(
            address=self.address, peer_id=self.own_id, round=round_number, digest=prepared.digest,
            total_squared_norm=total_squared_norm, stage_squared_norm=norm,
            partners=[*shares, *_partners(ready, partners)] if partners else [],
        )  # fmt: skip
        await self._commit(holders, request)

    async def _commit(self, holders: Members, request: pb.CommitRequest) -> None:
        started_at = self.clock.monotonic()
        floor = self.timing.commit_seconds + self.vector_bytes / self.timing.work_bytes_per_second
        timeout_seconds = self._deadline(floor, self.times.commit_seconds)
        replies = await self.broadcast(holders, COMMIT, dict.fromkeys(holders, request), timeout_seconds)
        if not any(isinstance(reply, SLOW) for reply in replies.values()):
            # What a deadline has cut off says nothing; the deadlines that followed from it would grow round by round.
            self.times.commit_seconds = self.clock.monotonic() - started_at
        digests: dict[str, list[PeerId]] = {}
        for peer, reply in replies.items():
            if isinstance(reply, SwarmError):
                # It finds out from anybody's answer to its next report.
                logger.warning("the commit did not reach %s: %s", peer, reply)
            elif not reply.HasField("refusal"):
                digests.setdefault(reply.state_digest, []).append(peer)
        if len(digests) > 1:
            logger.error("members differ after the same round %d: %s", request.round, digests)

    def _is_first_timeout(self, timed_out: bool) -> bool:
        """Slow is not dead: the first time-out only doubles the deadlines."""
        self.times.num_timeouts += timed_out
        return timed_out and self.times.num_timeouts == 1

    def _deadline(self, floor: float, measured: float) -> float:
        return (floor + 3 * measured) * float(2 ** min(3, self.times.num_timeouts))


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
