"""One attempt at a round, from closing to commit, as its leader drives it.

    Begin to all, and again to those that are still closing
    -> Average to all -> Barrier with the other stages -> Commit to all

If an earlier result may have been decided, Average is left out and that result is committed. If the attempt fails
before a result is decided, Abort goes to all. A result is decided once this leader has the answers of all members of
its exchange that they have prepared it; from then on no leader ever aborts it. If one of these answers is lost, the
attempt is aborted even though its sender has prepared the result. Never touches tensors.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.blame import SLOW, AttemptFailed, Blame, require_true_results, without_the_useless
from swarm.averaging.agreement.group import Ballot
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.place import Decision, Place
from swarm.averaging.agreement.rules import Begun, superfluous, unfinished
from swarm.averaging.agreement.timing import deadline_seconds
from swarm.averaging.barrier import Barrier
from swarm.averaging.led_exchanges import LedExchanges
from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import ABORT, BEGIN, COMMIT, Broadcast, Members, contact_of
from swarm.errors import DeadlineExceeded, NotReady, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import Block, PeerId

logger = logging.getLogger(__name__)

MOST_COMMITS = 4
"""A result that was to be committed so often is none: its holders would have committed it, and moved on."""
MOST_HALVINGS = 10
TELL_SECONDS = 10.0
"""Least time between two lines about members that are still closing."""


@dataclass(eq=False)
class Round:
    context: Context
    place: Place
    watch: RoundWatch
    broadcast: Broadcast
    barrier: Barrier
    shared: TiedParameters
    blame: Blame
    exchanges: LedExchanges
    _told_at: float = field(default=-math.inf, init=False)
    _num_late: Counter[PeerId] = field(default_factory=Counter, init=False)
    """How often each member has used up the longest time for closing, since it last closed in time. Each time it gets
    half as long, because it may only pretend to close."""
    _num_commits: Counter[tuple[int, str]] = field(default_factory=Counter, init=False)
    """How often the commit of a round's result was sent, by round and digest."""
    _commit_seconds: float = field(default=0.0, init=False)
    """How long the last commit took."""

    async def attempt(self, members: Members, standing: Standing, number: int) -> None:
        """Try to commit the round among `members`.

        Returns when a result is decided and its commit was sent, or when the round was committed in another way while
        this attempt waited for other stages. After a cancellation, members do not know how the attempt ends.

        Raises:
            AttemptFailed: nothing was decided here, and members were told so.
            SwarmError: the averages of tied parameters that the commit needs cannot be had. The result stays prepared.
        """
        ballot, amended = Ballot(number, self.context.own_id), self.place.timeline.digest_at(standing.round)
        with self.place.leading(ballot):
            try:
                begun = await self._ask_to_begin(members, standing, ballot, amended)
                prepared = unfinished(begun)
                if prepared is None:
                    prepared, holders = await self.exchanges.run(members, begun, standing, ballot, amended)
                else:
                    logger.info("finishing attempt %d of %s", prepared.ballot.attempt, prepared.ballot.leader_id)
                    holders = [peer for peer, reply in begun.items() if reply.prepared.digest == prepared.digest]
                    if self._num_commits[standing.round, prepared.digest] >= MOST_COMMITS:
                        logger.warning("left out, because they do not commit what they hold: %s", ", ".join(holders))
                        raise AttemptFailed("a result is not committed by its holders", excluded=holders)
                await self._finish(standing.round, prepared, {peer: members[peer] for peer in holders})
            except AttemptFailed as failed:
                reachable = {peer: record for peer, record in members.items() if peer not in failed.unreachable}
                await self._tell_abort(reachable, standing.round, ballot, failed)
                raise

    # -- all promise the attempt, and close their contributions

    async def _ask_to_begin(self, members: Members, standing: Standing, ballot: Ballot, amended: str) -> Begun:
        """Ask members to begin an attempt. Returns the answers of the members that began. Either they show that an
        earlier attempt's result has to be finished, or these members together hold all that the round needs, and no
        microbatch twice. Raises AttemptFailed if the attempt cannot go on."""

        timeline, amendments = self.place.timeline, self.place.timeline.texts

        def request(drop: Collection[int] = ()) -> pb.BeginRequest:
            return pb.BeginRequest(
                address=self.context.address, peer_id=self.context.own_id, ballot=messages.pack_ballot(ballot),
                standing=messages.pack_standing(standing), drop_gaps=messages.pack_indices(drop), amended=amended,
                amendments=amendments,
            )  # fmt: skip

        replies = await self._ask_to_close(members, dict.fromkeys(members, request()))
        begun = {peer: reply for peer, reply in replies.items() if isinstance(reply, pb.BeginReply)}
        unreached = {peer: reply for peer, reply in replies.items() if isinstance(reply, SwarmError)}
        for peer, told in begun.items():
            timeline.hear(told.amendments, peer)  # Those that refused for want of them; the next attempt has them.
        self.blame.require_obedience(begun, unreached, self.watch.has_quorum)
        require_true_results(begun, ballot)
        if unfinished(begun) is not None:
            return begun
        block, config = self.context.own.block, timeline.under(amended)
        if self.context.config.rounds.synchronous:
            of_round = config.microbatches_after(standing.run_samples, block)
            # This can take long: a member computes again the microbatches that it drops, or those that it keeps.
            drops = {peer: request(drop) for peer, drop in superfluous(begun, of_round).items()}
            for peer, reply in (await self._ask_to_close(members, drops)).items():
                if isinstance(reply, SwarmError) or reply.HasField("refusal"):
                    raise self.blame.failure("a member could not drop a duplicate", {peer: reply})
                begun[peer] = reply
        own_id = self.context.own_id
        if failed := without_the_useless(begun, config, block, standing.run_samples, own_id, amended=amended):
            raise failed
        self._require_whole_round(standing, begun, unreached)
        return begun

    def _require_whole_round(self, standing: Standing, begun: Begun, unreached: dict[PeerId, SwarmError]) -> None:
        committed = frozenset[int]().union(*(messages.unpack_indices(r.committed_gaps) for r in begun.values()))
        num_samples = sum(reply.round_samples for reply in begun.values())
        if not self.watch.may_end(standing, committed, num_samples, begun.keys()):
            failed = self.blame.failure("the round is not complete any more", unreached)
            failed.void = True
            raise failed
        wanted = self.place.timeline.at(standing.round).round_samples_of(self.context.own.block)
        if self.context.config.rounds.synchronous and num_samples != wanted:
            # Then some sum holds samples of other microbatches than it names, or holds some twice.
            reason = f"{num_samples} samples were contributed to a round of another size"
            raise self.blame.failure(reason, unreached)

    async def _ask_to_close(
        self, members: Members, requests: dict[PeerId, pb.BeginRequest]
    ) -> dict[PeerId, pb.BeginReply | SwarmError]:
        """Ask members to close their contributions. Wait for slow ones as long as they make progress."""
        started_at = self.context.clock.monotonic()
        timeout_seconds = deadline_seconds(self.context.timing.begin_seconds, 0.0, self.blame.num_timeouts)
        wait_seconds = min(self.context.timing.closing_seconds, timeout_seconds / 2)
        for request in requests.values():
            request.wait_seconds = wait_seconds
        answers: dict[PeerId, pb.BeginReply | SwarmError] = {}
        waiting = dict(requests)
        while waiting:
            asked, asked_at = {peer: members[peer] for peer in waiting}, self.context.clock.monotonic()
            for peer, answer in (await self.broadcast(asked, BEGIN, waiting, timeout_seconds)).items():
                reply = messages.checked_begin(answer)
                if isinstance(reply, pb.BeginReply) and reply.HasField("closing"):
                    late = self._too_late(
                        peer, reply.closing, self.context.clock.monotonic() - started_at, timeout_seconds
                    )
                    if late is None:
                        continue
                    reply = late
                elif isinstance(reply, pb.BeginReply):
                    del self._num_late[peer]
                del waiting[peer]
                answers[peer] = reply
                if isinstance(reply, pb.BeginReply) and reply.HasField("refusal"):
                    # The others go on closing, and the next attempt joins that.
                    return answers
            if waiting:
                # A member may have answered at once that it is still closing: ask again only after the time that it was
                # given.
                await self.context.clock.sleep(max(0.0, asked_at + wait_seconds - self.context.clock.monotonic()))
                if self.context.clock.monotonic() - self._told_at >= TELL_SECONDS:
                    self._told_at = self.context.clock.monotonic()
                    logger.info("waits for members that close their contributions: %s", ", ".join(sorted(waiting)))
        return answers

    def _too_late(self, peer: PeerId, closing: pb.Closing, seconds: float, timeout_seconds: float) -> SwarmError | None:
        """The reason to wait no longer for a member that is still closing after `seconds`; None if there is none."""
        if seconds > self.context.timing.max_closing_seconds / 2 ** min(self._num_late[peer], MOST_HALVINGS):
            self._num_late[peer] += 1
            # The progress is only the member's own claim, so it is not waited for without end.
            return NotReady(f"it has not closed its contribution in {seconds:.0f} s")
        if closing.quiet_seconds > timeout_seconds + 3 * closing.expected_seconds:
            return DeadlineExceeded(f"it has been closing for {seconds:.0f} s, and makes no progress")
        return None

    async def _tell_abort(self, members: Members, round_number: int, ballot: Ballot, failed: AttemptFailed) -> None:
        request = pb.AbortRequest(
            address=self.context.address, peer_id=self.context.own_id, round=round_number,
            ballot=messages.pack_ballot(ballot), reason=str(failed), void=failed.void,
        )  # fmt: skip
        await self.broadcast(members, ABORT, dict.fromkeys(members, request), self.context.timing.begin_seconds)

    # -- once a result is decided: the barrier, and the commit

    async def _finish(self, round_number: int, prepared: pb.Prepared, holders: Members) -> None:
        """Commit the decided result, once the stages that it waits for have decided theirs. Raises AttemptFailed if one
        of them has decided under later amendments, and IntegrityError if the result was made under unknown ones."""
        block, norm, partners = self.context.own.block, prepared.squared_norm, self.shared.partners(round_number)
        shares = [_partner(block, prepared.digest, contact_of(next(iter(holders.values()))))]
        ready: dict[Block, pb.BarrierReply] = {}

        async def wait_for(blocks: Collection[Block]) -> bool:
            replies = await self.barrier.wait_for(blocks, round_number, prepared.amended)
            ready.update(replies or {})
            return replies is not None

        if self.shared.counts_norm(block, round_number):
            # The other stages need this stage's norm, which depends on the partners' averages. So the partners are
            # awaited first: they decide without waiting for this stage.
            if not await wait_for(partners):
                return
            averaging, parts = self.place.timeline.under(prepared.amended).averaging, _partners(ready, partners)
            norm += await self.shared.squared_norm_of_sum(round_number, [*shares, *parts], averaging)
        self.place.decide(Decision(round=round_number, prepared=prepared, squared_norm=norm))
        self.context.changes.signal()
        if not await wait_for(self.barrier.awaited(round_number) - ready.keys()):
            return
        norms = {block: norm} | {other: reply.squared_norm for other, reply in ready.items()}
        # Added one by one and in the same order at every stage, so that the total has the same bits. `sum` rounds
        # differently in some releases of Python.
        total_squared_norm = 0.0
        for each in sorted(norms):
            total_squared_norm += norms[each]
        request = pb.CommitRequest(
            address=self.context.address,
            peer_id=self.context.own_id,
            round=round_number,
            digest=prepared.digest,
            total_squared_norm=total_squared_norm,
            stage_squared_norm=norm,
            partners=[*shares, *_partners(ready, partners)] if partners else [],
            signatures=prepared.signatures,
        )
        await self._tell_commit(holders, request)

    async def _tell_commit(self, holders: Members, request: pb.CommitRequest) -> None:
        started_at, key = self.context.clock.monotonic(), (request.round, request.digest)
        self._num_commits = Counter({key: self._num_commits[key] + 1})
        floor_seconds = self.context.timing.applying_seconds(self.exchanges.vector_bytes)
        timeout_seconds = deadline_seconds(floor_seconds, self._commit_seconds, self.blame.num_timeouts)
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


def _partner(block: Block, digest: str, contact: pb.Contact) -> pb.Partner:
    return pb.Partner(stage=block.stage, variant=block.variant, digest=digest, contact=contact)


def _partners(ready: Mapping[Block, pb.BarrierReply], blocks: Collection[Block]) -> list[pb.Partner]:
    return [_partner(block, ready[block].digest, ready[block].leader) for block in sorted(blocks)]
