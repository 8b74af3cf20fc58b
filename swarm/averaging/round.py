"""One attempt at a round, from closing to commit, as its leader drives it.

    Begin to all, and again to those that are still closing
    -> Average to all
    -> Barrier with the other stages; with DiLoCo only with those that have the same tied parameters
    -> Commit to all

If an earlier result may have been decided, Average is left out and that result is committed. If the attempt fails
before a result is decided, Abort goes to all. A result is decided once this leader has the answers of all members of
its exchange that they have prepared it; from then on no leader ever aborts it. If one of these answers is lost, the
attempt is aborted even though its sender has prepared the result. Never touches tensors.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.blame import SLOW, AttemptFailed, Blame, require_true_results, without_the_useless
from swarm.averaging.agreement.messages import Ballot, Standing
from swarm.averaging.agreement.place import Begun, Place, unfinished
from swarm.averaging.agreement.rules import agreed, superfluous
from swarm.averaging.agreement.shares import Shares, clip_of, divide, prepared_of
from swarm.averaging.agreement.timing import OWNER_PATIENCE, deadline_seconds
from swarm.averaging.barrier import Barrier
from swarm.averaging.groups import Groups, Results
from swarm.averaging.vectors.exchange import given_after
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import ABORT, AVERAGE, BEGIN, COMMIT, Broadcast, Members, contact_of
from swarm.compression.codec import Codec, contribution_codec
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded, NotReady, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.tally import Given
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MOST_COMMITS = 4
"""Commits of one result after which its holders are not believed any more: if they had it, they would have moved on."""
MOST_HALVINGS = 10
TELL_SECONDS = 10.0
"""Least time between two lines about members that are still closing."""


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """An attempt that this peer leads. `config` is the one under the amendments up to `amended`."""

    members: Members
    standing: Standing
    ballot: Ballot
    amended: str
    config: RunConfig

    @property
    def codec(self) -> Codec:
        return contribution_codec(self.config.averaging)


@dataclass(eq=False)
class Round:
    context: Context
    place: Place
    watch: RoundWatch
    broadcast: Broadcast
    barrier: Barrier
    blame: Blame
    _told_at: float = field(default=-math.inf, init=False)
    _num_late: Counter[PeerId] = field(default_factory=Counter, init=False)
    """How often each member has used up the longest time for closing, since it last closed in time. Each time it gets
    half as long, because it may only pretend to close."""
    _num_commits: Counter[tuple[int, str]] = field(default_factory=Counter, init=False)
    """How often the commit of a round's result was sent, by round and digest."""
    _exchange_seconds: float = field(default=0.0, init=False)
    """How long the last exchange took."""
    _vector_bytes: int = field(default=0, init=False)
    """The size of a contribution in float32, once one was exchanged."""
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
        config = self.place.timeline.under(amended)
        attempt = _Attempt(members=members, standing=standing, ballot=ballot, amended=amended, config=config)
        with self.place.leading(ballot):
            try:
                begun = await self._ask_to_begin(attempt)
                prepared = unfinished(begun)
                if prepared is None:
                    prepared, holders = await self._ask_to_average(attempt, begun)
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

    async def _ask_to_begin(self, attempt: _Attempt) -> Begun:
        """Ask members to begin an attempt. Returns the answers of the members that began. Either they show that an
        earlier attempt's result has to be finished, or these members together hold all that the round needs, and no
        microbatch twice. Raises AttemptFailed if the attempt cannot go on."""
        timeline, amendments = self.place.timeline, self.place.timeline.texts
        members, standing, amended = attempt.members, attempt.standing, attempt.amended

        def request(drop: Collection[int] = ()) -> pb.BeginRequest:
            return pb.BeginRequest(
                address=self.context.address, peer_id=self.context.own_id, ballot=messages.pack_ballot(attempt.ballot),
                standing=messages.pack_standing(standing), drop_gaps=messages.pack_indices(drop), amended=amended,
                amendments=amendments,
            )  # fmt: skip

        replies = await self._ask_to_close(members, dict.fromkeys(members, request()))
        begun = {peer: reply for peer, reply in replies.items() if isinstance(reply, pb.BeginReply)}
        unreached = {peer: reply for peer, reply in replies.items() if isinstance(reply, SwarmError)}
        for peer, told in begun.items():
            timeline.hear(told.amendments, peer)  # Those that refused for want of them; the next attempt has them.
        self.blame.require_obedience(begun, unreached, self.watch.has_quorum)
        require_true_results(begun, attempt.ballot)
        if unfinished(begun) is not None:
            return begun
        block, config = self.context.own.block, attempt.config
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

    # -- they average ------------------------------------------------------------------------------------------------

    async def _ask_to_average(self, attempt: _Attempt, begun: Begun) -> tuple[pb.Prepared, list[PeerId]]:
        """Have the members that began the attempt average. Returns the result, which is decided, and the members that
        hold it. Raises AttemptFailed if nothing is decided."""
        begun, size = dict(sorted(begun.items())), self.context.config.averaging.group_size
        if 0 < size < len(begun):
            groups = Groups(
                begun=begun, size=size, standing=attempt.standing, tile=attempt.codec.tile,
                exchange=partial(self._exchange, attempt), hand_down=partial(self._hand_down, attempt),
                roster=self.watch.roster, blame=self.blame,
            )  # fmt: skip
            prepared, held = await groups.average(attempt.ballot)
        else:
            held = await self._exchange(attempt, begun)
            prepared = messages.unsigned(agreed(held, self.context.own_id))
            self.blame.exchanged(begun)
        return messages.signed_by_all(prepared, held.values()), list(held)

    async def _exchange(
        self, attempt: _Attempt, begun: Begun, given: Mapping[str, Given] | None = None, *, is_part: bool = False
    ) -> Results:
        """Have these members exchange: divide the vector among them, and send Average with their counts. With groups,
        `is_part` says that this is one of a group. Or each gives its group's average, and `given` says what those in
        it have given. Raises AttemptFailed unless all have prepared the same."""
        started_at, number, is_whole = self.context.clock.monotonic(), attempt.standing.round, not (is_part or given)
        owners = self.blame.owners(number, begun) if is_whole else {*begun}
        if attempt.codec.is_sparse and len(owners) < len(begun):
            owners = {self.context.own_id}  # In a gather all would need each other, unless one owns everything.
        shares = divide(
            {peer: begun[PeerId(peer)] for peer in self.blame.suspects.in_order(begun, number)},
            num_elements=next(iter(begun.values())).num_elements, tile=attempt.codec.tile,
            clip_to_median=clip_of(attempt.config), owners=owners,
        )  # fmt: skip
        shares = replace(shares, amended=attempt.amended)
        self._vector_bytes = 4 * shares.num_elements
        request = self._average_request(attempt, shares, num_times=max(4, 2 * -(-(len(begun) - 1) // len(owners))))
        request.is_part = is_part
        if given:
            request.member_ids.extend(sorted(given))
            request.given.extend(messages.pack_given(given, request.member_ids))
        replies = await self._call_average(attempt, request)
        told = _results(replies)
        if len(told) < len(begun):
            took_long = self.context.clock.monotonic() - started_at >= OWNER_PATIENCE * request.timeout_seconds
            raise self.blame.failed_exchange(
                replies, begun, owners, number, attempt.ballot, is_whole=is_whole, took_long=took_long
            )
        digests = {peer: prepared.digest for peer, prepared in told.items()}
        if len(set(digests.values())) > 1:
            raise self.blame.different_results(digests)
        self._exchange_seconds = self.context.clock.monotonic() - started_at
        after = given_after(given or {}, shares, attempt.config.averaging)
        return {
            peer: messages.signed_by_all(
                prepared_of(request, shares, told[peer].digest, told[peer].squared_norm, after), [told[peer]]
            )
            for peer in begun
        }

    async def _hand_down(self, attempt: _Attempt, shares: Shares, prepared: pb.Prepared) -> Results:
        request = self._average_request(attempt, shares)
        request.handed_down.CopyFrom(prepared)
        return _results(await self._call_average(attempt, request))

    def _average_request(self, attempt: _Attempt, shares: Shares, *, num_times: int = 4) -> pb.AverageRequest:
        """A call for an exchange in which a line carries the vector so many times at worst. Four times, if every member
        sends the whole vector and gets it back, and all of that goes over one line."""
        floor_seconds = self.context.timing.exchange_seconds(num_times * attempt.codec.num_bytes(shares.num_elements))
        named = [
            pb.Share(
                contact=contact_of(attempt.members[PeerId(share.peer_id)]), num_samples=share.counts.num_samples,
                num_targets=share.counts.num_targets, round_samples=share.counts.round_samples,
                norm=share.counts.norm, num_elements=share.num_elements,
            )
            for share in shares.members
        ]  # fmt: skip
        return pb.AverageRequest(
            address=self.context.address, peer_id=self.context.own_id, round=attempt.standing.round,
            ballot=messages.pack_ballot(attempt.ballot), shares=named,
            timeout_seconds=deadline_seconds(floor_seconds, self._exchange_seconds, self.blame.num_timeouts),
        )  # fmt: skip

    async def _call_average(self, attempt: _Attempt, request: pb.AverageRequest) -> dict[PeerId, Any]:
        asked = {peer: attempt.members[peer] for peer in (PeerId(share.contact.peer_id) for share in request.shares)}
        timeout_seconds = request.timeout_seconds + self.context.timing.grace_seconds
        requests = dict.fromkeys(asked, request)
        replies = await self.broadcast(asked, AVERAGE, requests, timeout_seconds, until=_is_prepared)
        return {peer: messages.checked_average(reply) for peer, reply in replies.items()}

    # -- the attempt ends --------------------------------------------------------------------------------------------

    async def _finish(self, round_number: int, prepared: pb.Prepared, holders: Members) -> None:
        """Commit the decided result, once the stages that this one waits for have decided theirs. DiLoCo without tied
        parameters waits for nobody. Raises what Barrier.before_commit does."""
        request = await self.barrier.before_commit(round_number, prepared, holders)
        if request is not None:
            await self._tell_commit(holders, request)

    async def _tell_commit(self, holders: Members, request: pb.CommitRequest) -> None:
        started_at, key = self.context.clock.monotonic(), (request.round, request.digest)
        self._num_commits = Counter({key: self._num_commits[key] + 1})
        floor_seconds = self.context.timing.applying_seconds(self._vector_bytes)
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

    async def _tell_abort(self, members: Members, round_number: int, ballot: Ballot, failed: AttemptFailed) -> None:
        request = pb.AbortRequest(
            address=self.context.address, peer_id=self.context.own_id, round=round_number,
            ballot=messages.pack_ballot(ballot), reason=str(failed), void=failed.void,
        )  # fmt: skip
        await self.broadcast(members, ABORT, dict.fromkeys(members, request), self.context.timing.begin_seconds)


def _results(replies: Mapping[PeerId, Any]) -> Results:
    return {peer: reply.prepared for peer, reply in replies.items() if _is_prepared(reply)}


def _is_prepared(reply: Any) -> bool:
    return isinstance(reply, pb.AverageReply) and reply.HasField("prepared")
