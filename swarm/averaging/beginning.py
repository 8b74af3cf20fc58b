"""How an attempt begins: all members promise it and close their contributions, which together make up a whole round.

Also decides which member drops a microbatch that several members of a synchronous round count.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.blame import SLOW, AttemptFailed, Blame, without_the_useless
from swarm.averaging.agreement.group import Ballot
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.rules import Begun, unfinished
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import BEGIN, Broadcast, Members
from swarm.errors import DeadlineExceeded, MalformedMessage, NotReady, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MOST_HALVINGS = 10
TELL_SECONDS = 10.0
"""Least time between two lines about members that are still closing."""


@dataclass(eq=False)
class Beginning:
    """Begins one leader's attempts."""

    context: Context
    watch: RoundWatch
    broadcast: Broadcast
    blame: Blame
    _told_at: float = field(default=-math.inf, init=False)
    _num_late: Counter[PeerId] = field(default_factory=Counter, init=False)
    """How often each member has used up the longest time for closing, since it last closed in time. Each time it gets
    half as long, because it may only pretend to close."""

    async def of(self, members: Members, standing: Standing, ballot: Ballot) -> Begun:
        """Ask members to begin an attempt.

        Returns:
            The answers of the members that began. Either they show that an earlier attempt's result has to be finished,
            or these members together hold all that the round needs, and no microbatch twice.

        Raises:
            AttemptFailed: the attempt cannot go on.
        """

        def request(drop: Collection[int] = ()) -> pb.BeginRequest:
            return pb.BeginRequest(
                address=self.context.address,
                peer_id=self.context.own_id,
                ballot=messages.pack_ballot(ballot),
                standing=messages.pack_standing(standing),
                drop_gaps=messages.pack_indices(drop),
            )

        replies = await self._close(members, dict.fromkeys(members, request()))
        begun = {peer: reply for peer, reply in replies.items() if isinstance(reply, pb.BeginReply)}
        unreached = {peer: reply for peer, reply in replies.items() if isinstance(reply, SwarmError)}
        self._require_obedience(begun, unreached)
        self._require_true_results(begun, ballot)
        if unfinished(begun) is not None:
            return begun
        if self.context.config.rounds.synchronous:
            # This can take long, because a member computes again the microbatches that it drops, or those that it
            # keeps.
            drops = {peer: request(drop) for peer, drop in duplicates(begun).items()}
            for peer, reply in (await self._close(members, drops)).items():
                if isinstance(reply, SwarmError) or reply.HasField("refusal"):
                    raise self.blame.failure("a member could not drop a duplicate", {peer: reply})
                begun[peer] = reply
        failed = without_the_useless(begun, self.context.config, standing.round, self.context.own_id)
        if failed is not None:
            raise failed
        self._require_whole_round(standing.round, begun, unreached)
        return begun

    def _require_obedience(self, begun: Begun, unreached: dict[PeerId, SwarmError]) -> None:
        refused = {peer: reply.refusal for peer, reply in begun.items() if reply.HasField("refusal")}
        if refused:
            failed = self.blame.failure("a member refused to begin", unreached)
            failed.refused = set(refused)
            failed.promised_attempt = max(refusal.promised.attempt for refusal in refused.values())
            failed.excluded |= self.blame.struck_out(refused)
            raise failed
        is_slow = any(isinstance(error, SLOW) for error in unreached.values())
        if self.blame.is_first_timeout(is_slow):
            raise self.blame.failure("a member is slow", unreached)
        if not self.watch.has_quorum(begun.keys()):
            raise self.blame.failure("too few members for a quorum", unreached)

    def _require_true_results(self, begun: Begun, ballot: Ballot) -> None:
        """Raise AttemptFailed if a member holds a result of an attempt that nobody has led, or that others hold."""
        failed = AttemptFailed("a member holds a result that cannot be")
        for peer, reply in begun.items():
            if not reply.HasField("prepared"):
                continue
            if messages.require_ballot(reply.prepared.ballot) >= ballot or peer not in reply.prepared.member_ids:
                logger.warning("%s is left out: it holds a result that cannot be", peer)
                failed.excluded.add(peer)
        if failed.excluded:
            raise failed

    def _require_whole_round(self, round_number: int, begun: Begun, unreached: dict[PeerId, SwarmError]) -> None:
        committed = frozenset[int]().union(*(messages.unpack_indices(r.committed_gaps) for r in begun.values()))
        num_samples = sum(reply.round_samples for reply in begun.values())
        if not self.watch.is_complete(round_number, committed, num_samples, begun.keys()):
            failed = self.blame.failure("the round is not complete any more", unreached)
            failed.void = True
            raise failed
        if self.context.config.rounds.synchronous and num_samples != self.context.config.rounds.round_samples:
            # Then some sum holds samples of other microbatches than it names, or holds some twice.
            reason = f"{num_samples} samples were contributed to a round of another size"
            raise self.blame.failure(reason, unreached)

    async def _close(
        self, members: Members, requests: dict[PeerId, pb.BeginRequest]
    ) -> dict[PeerId, pb.BeginReply | SwarmError]:
        """Ask members to close their contributions. Wait for slow ones as long as they make progress."""
        started_at = self.context.clock.monotonic()
        timeout_seconds = self.blame.deadline(self.context.timing.begin_seconds, 0.0)
        wait_seconds = min(self.context.timing.closing_seconds, timeout_seconds / 2)
        for request in requests.values():
            request.wait_seconds = wait_seconds
        answers: dict[PeerId, pb.BeginReply | SwarmError] = {}
        waiting = dict(requests)
        while waiting:
            asked, asked_at = {peer: members[peer] for peer in waiting}, self.context.clock.monotonic()
            for peer, answer in (await self.broadcast(asked, BEGIN, waiting, timeout_seconds)).items():
                reply = _checked(answer)
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
                self._tell_of(waiting)
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

    def _tell_of(self, waiting: Collection[PeerId]) -> None:
        if self.context.clock.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = self.context.clock.monotonic()
            logger.info("waits for members that close their contributions: %s", ", ".join(sorted(waiting)))


def _checked(reply: pb.BeginReply | SwarmError) -> pb.BeginReply | SwarmError:
    """Return a member's answer, or MalformedMessage if the answer makes no sense."""
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


def duplicates(begun: Mapping[PeerId, pb.BeginReply]) -> dict[PeerId, set[int]]:
    """The microbatches that each member is to drop, because another member counts them too.

    A member has to compute again either the microbatches that it drops or those that it keeps, whichever are fewer. So
    a member that can drop most of its sum drops all that it can, if that means less work for the member with the most
    work, or, where that stays the same, less work in all. The other duplicates are divided equally.
    """
    held = {peer: messages.unpack_indices(reply.committed_gaps) for peer, reply in sorted(begun.items())}
    holders: dict[int, list[PeerId]] = {}
    for peer, indices in held.items():
        for index in indices:
            holders.setdefault(index, []).append(peer)
    holders = {index: holders[index] for index in sorted(holders) if len(holders[index]) > 1}
    doubles = Counter(peer for peers in holders.values() for peer in peers)
    emptied: list[PeerId] = []
    drops = _shared(holders, emptied)
    # Others may have replayed nearly all that a member counts. Check for each such member whether dropping all its
    # duplicates is better.
    nearly = [peer for peer, number in doubles.items() if 2 * number > len(held[peer])]
    for peer in sorted(nearly, key=lambda peer: (len(held[peer]) - doubles[peer], peer)):
        others = _shared(holders, [*emptied, peer])
        if _work(held, others) < _work(held, drops):
            emptied, drops = [*emptied, peer], others
    return drops


def _shared(holders: Mapping[int, Sequence[PeerId]], emptied: Sequence[PeerId]) -> dict[PeerId, set[int]]:
    """Return what each member drops. The members in `emptied`, in order, drop all that they can; the others divide the
    rest equally."""
    drops: dict[PeerId, set[int]] = {}
    num_taken_out = Counter[PeerId]()
    for index, peers in holders.items():
        staying = [peer for peer in peers if peer not in emptied] or [max(peers, key=emptied.index)]
        keeper = max(staying, key=lambda peer: num_taken_out[peer])
        num_taken_out.update(peer for peer in staying if peer != keeper)
        for peer in peers:
            if peer != keeper:
                drops.setdefault(peer, set()).add(index)
    return drops


def _work(held: Mapping[PeerId, Set[int]], drops: Mapping[PeerId, Set[int]]) -> tuple[int, int]:
    """The number of microbatches to compute again: by the member with the most, and by all members together."""
    by_member = [min(len(indices), len(held[peer]) - len(indices)) for peer, indices in drops.items()]
    return max(by_member, default=0), sum(by_member)
