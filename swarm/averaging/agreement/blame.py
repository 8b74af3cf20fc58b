"""Why an attempt failed, which members the next attempt leaves out, and whether it waits longer."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Ballot
from swarm.averaging.agreement.place import Begun
from swarm.averaging.agreement.shares import Counts
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded, Overloaded, PeerUnavailable, SwarmError
from swarm.honesty.suspects import Suspects
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import Block, PeerId

logger = logging.getLogger(__name__)

MOST_THROUGH_ONE = 8
"""The largest group in which one member may sum everything, because no two others can reach each other: that member's
line carries all that they send."""
SLOW = DeadlineExceeded, Overloaded
"""The first error of these kinds only doubles the deadlines."""
MOST_STRIKES = 4
"""After this many attempts that it has made fail for no reason that holds, a member is left out."""


class AttemptFailed(Exception):
    """Nothing was decided; the attempt is aborted. Does not leave this package."""

    def __init__(self, reason: str, *, excluded: Iterable[PeerId] = (), void: bool = False) -> None:
        """`excluded` are members that are alive, but make attempts fail. `void` says whether it is certain that no
        result of an earlier attempt was or will be decided."""
        super().__init__(reason)
        self.unreachable: set[PeerId] = set()
        self.excluded = set(excluded)
        self.refused: set[PeerId] = set()
        self.promised_attempt = 0
        self.void = void


class Blame:
    """One leader's conclusions from failed attempts.

    Attributes:
        num_timeouts: time-outs in a row; every one doubles the deadlines (see timing).
        suspects: what owners of parts say of members' contributions.
    """

    def __init__(self, own_id: PeerId, suspects: Suspects) -> None:
        self._own_id = own_id
        self._apart: tuple[int, frozenset[PeerId]] = (-1, frozenset())
        """The round in which connections between other members failed, and these members. In that round they own no
        parts, so that they need no connection."""
        self.num_timeouts = 0
        self._timed_out_in: tuple[int, Ballot] | None = None
        """The last attempt in which an exchange timed out. Those of its groups count once."""
        self.suspects = suspects
        self._strikes = Counter[PeerId]()
        """How many attempts each member has made fail for no reason that holds, since it last took part in an exchange
        that was completed."""

    def is_first_timeout(self, timed_out: bool, *, again: bool = False) -> bool:
        """Count a time-out, if there was one, unless it was counted already. Returns whether it is the first in a row:
        that one only doubles the deadlines."""
        self.num_timeouts += timed_out and not again
        return timed_out and self.num_timeouts == 1

    def exchanged(self, members: Collection[PeerId]) -> None:
        self.num_timeouts = 0
        for peer in members:
            del self._strikes[peer]

    def struck_out(self, peers: Collection[PeerId]) -> set[PeerId]:
        """Note that these members made an attempt fail for no reason that holds, and return those that have done so too
        often. Once may be an accident: they may have promised another leader's attempt."""
        self._strikes.update(peer for peer in peers if peer != self._own_id)
        out = {peer for peer in peers if self._strikes[peer] >= MOST_STRIKES}
        if out:
            logger.warning("left out, because they make attempts fail again and again: %s", ", ".join(sorted(out)))
        return out

    # -- which members the next attempt leaves out -------------------------------------------------------------------

    def failure(self, reason: str, replies: Mapping[PeerId, Any]) -> AttemptFailed:
        """Make the error of an attempt that decided nothing. It names the members that the next attempt leaves out.

        These are members that answered with an error, because they would do so again. From the second time-out in a row
        on, they include slow members. Both kinds are alive and go on reporting, so the stage would wait for them for
        ever.
        """
        failed = AttemptFailed(reason)
        for peer, reply in replies.items():
            if isinstance(reply, PeerUnavailable) and reply.is_unreachable:
                failed.unreachable.add(peer)
            elif isinstance(reply, SLOW):
                if self.num_timeouts > 1:
                    failed.excluded.add(peer)
            elif isinstance(reply, SwarmError):
                failed.excluded.add(peer)
        if failed.excluded:
            logger.warning("left out, because they failed or are slow: %s", ", ".join(sorted(failed.excluded)))
        return failed

    def require_obedience(
        self, begun: Begun, unreached: Mapping[PeerId, SwarmError], has_quorum: Callable[[Collection[str]], bool]
    ) -> None:
        """Raise AttemptFailed if a member refused to begin, if one is slow for the first time, or if too few began."""
        refused = {peer: reply.refusal for peer, reply in begun.items() if reply.HasField("refusal")}
        if refused:
            failed = self.failure("a member refused to begin", unreached)
            failed.refused = set(refused)
            failed.promised_attempt = max(refusal.promised.attempt for refusal in refused.values())
            failed.excluded |= self.struck_out(refused)
            raise failed
        is_slow = any(isinstance(error, SLOW) for error in unreached.values())
        if self.is_first_timeout(is_slow):
            raise self.failure("a member is slow", unreached)
        if not has_quorum(begun.keys()):
            raise self.failure("too few members for a quorum", unreached)

    def failed_exchange(
        self, replies: Mapping[PeerId, Any], members: Collection[PeerId], owners: Collection[str], round_number: int,
        ballot: Ballot, *, is_whole: bool, took_long: bool,
    ) -> AttemptFailed:  # fmt: skip
        """Like `failure`, but for an exchange, in which members also blame others from which they got nothing. `owners`
        are those that owned parts in it, and `is_whole` says whether it was one of all members, and not in groups.
        `took_long` says whether it took so long that an owner may have waited for another member in vain."""
        # Keyed by the member that noticed the failure, because other members only pass its error on.
        accusations, baseless = self._accusations(replies, members, owners)
        is_explained = bool(accusations) or any(isinstance(reply, PeerUnavailable) for reply in replies.values())
        attempt = round_number, ballot
        is_first = self.is_first_timeout(took_long or not is_explained, again=attempt == self._timed_out_in)
        if took_long or not is_explained:
            self._timed_out_in = attempt
        failed = self.failure("the exchange failed", replies)
        if not (is_explained or is_first or took_long):
            # Refusals twice in a row are no accident. But after a long exchange, a refusal only means that the member's
            # time was over.
            failed.excluded |= _refusing(replies, ballot)
        failed.excluded |= self.struck_out(baseless)
        if failed.unreachable or failed.excluded or is_first or not accusations:
            return failed
        counts = Counter(PeerId(failure.blamed_id) for failure in accusations.values())
        blamed, _ = counts.most_common(1)[0]
        accusers = {accuser: failure for accuser, failure in accusations.items() if failure.blamed_id == blamed}
        logger.warning(
            "the exchange failed because of %s: %s", blamed, messages.unpack_failure(next(iter(accusers.values())))
        )
        apart = frozenset(counts.keys() | accusations.keys()) | self._apart_in(round_number)
        left = {*members} - apart
        if self._own_id in left and ((is_whole and len(left) > 1) or len(members) <= MOST_THROUGH_ONE):
            # Connections between others are at fault. All of them have just answered this peer, so none is left out.
            # Groups are drawn anew.
            self._apart = round_number, apart
            return failed
        # If members blame the leader, and the leader itself noticed nothing, these members are cut off.
        is_cut_off = blamed == self._own_id and self._own_id not in accusers
        failed.excluded = set(accusers) if is_cut_off else {blamed}
        return failed

    def _accusations(
        self, replies: Mapping[PeerId, Any], members: Collection[PeerId], owners: Collection[str]
    ) -> tuple[dict[PeerId, pb.Failure], set[PeerId]]:
        """The failures that members noticed, and the members whose answers explain nothing."""
        answers = {peer: reply for peer, reply in replies.items() if isinstance(reply, pb.AverageReply)}
        accusations, baseless = dict[PeerId, pb.Failure](), set[PeerId]()
        for peer, reply in answers.items():
            failure = reply.failure
            blamed, noticed_by = PeerId(failure.blamed_id), PeerId(failure.noticed_by_id)
            if reply.HasField("refusal"):
                baseless.add(peer)
            elif not reply.HasField("failure"):
                continue
            elif noticed_by == peer:
                # Of two that own no parts, neither can have kept the other one waiting.
                if blamed in members and (peer in owners or blamed in owners):
                    accusations[peer] = failure
                else:
                    baseless.add(peer)
            elif noticed_by in answers:
                # It speaks for itself. What others pass on as its word, it has said as well.
                if answers[noticed_by].failure.blamed_id != blamed:
                    baseless.add(peer)
            elif noticed_by in members and blamed in members and blamed != self._own_id:
                accusations[noticed_by] = failure
            else:
                baseless.add(peer)
        return accusations, baseless

    def different_results(self, digests: Mapping[PeerId, str]) -> AttemptFailed:
        """Make the error of an exchange whose members came to different results. It leaves out those that differ from
        most of the others."""
        result, count = Counter(digests.values()).most_common(1)[0]
        others = {peer for peer, digest in digests.items() if digest != result} if 2 * count > len(digests) else set()
        if others:
            logger.warning("left out, because their result is not that of most: %s", ", ".join(sorted(others)))
        else:
            members = ", ".join(sorted(digests))
            logger.warning("%s came to different results, and nobody can say which of them is wrong", members)
        return AttemptFailed("members came to different results", excluded=others)

    def owners(self, round_number: int, members: Collection[PeerId]) -> set[PeerId]:
        """The members of this round that own parts: all but those that cannot reach each other, if any is left."""
        return {*members} - self._apart_in(round_number) or {*members}

    def _apart_in(self, round_number: int) -> frozenset[PeerId]:
        return self._apart[1] if self._apart[0] == round_number else frozenset()


def _refusing(replies: Mapping[PeerId, Any], ballot: Ballot) -> set[PeerId]:
    """Members that refuse this attempt, although it is the last that they promised."""
    promised = messages.pack_ballot(ballot)
    return {
        peer
        for peer, reply in replies.items()
        if isinstance(reply, pb.AverageReply) and reply.HasField("refusal") and reply.refusal.promised == promised
    }


def require_true_results(begun: Begun, ballot: Ballot) -> None:
    """Raise AttemptFailed if a member holds a result of an attempt that nobody has led, or that others hold."""
    liars = {
        peer
        for peer, reply in begun.items()
        if reply.HasField("prepared")
        and (messages.require_ballot(reply.prepared.ballot) >= ballot or peer not in reply.prepared.member_ids)
    }
    if liars:
        logger.warning("left out, because they hold a result that cannot be: %s", ", ".join(sorted(liars)))
        raise AttemptFailed("a member holds a result that cannot be", excluded=liars)


def without_the_useless(
    begun: Mapping[PeerId, pb.BeginReply], config: RunConfig, block: Block, run_samples: int, own_id: PeerId,
    *, amended: str = "",
) -> AttemptFailed | None:  # fmt: skip
    """Make the error of an attempt in which some contributions are useless. It leaves their members out. None if all
    are useful.

    In the synchronous setting a contribution holds exactly the microbatches of the round that its member names.

    Args:
        run_samples: the samples that the block had before this round.
        own_id: the leader, whose contribution has the right size.
        amended: the digest of the newest amendment that is in force.
    """
    sizes = Counter(reply.num_elements for reply in begun.values())
    size = begun[own_id].num_elements if own_id in begun else sizes.most_common(1)[0][0]
    useless = dict[PeerId, str]()
    for peer, reply in begun.items():
        fault = Counts.of(reply, reply.norm).fault(config, block)
        if not fault and reply.num_elements != size:
            fault = "of another size"
        if not fault and reply.amended != amended:
            fault = "made without the run's amendments, of which its release may not know"
        if not fault and config.rounds.synchronous:
            named = messages.unpack_indices_of(config.microbatches_after(run_samples, block), reply.committed_gaps)
            if {reply.num_samples, reply.round_samples} != {len(named) * config.data.microbatch_size}:
                fault = "of other samples than the microbatches that it names"
        if fault:
            useless[peer] = fault
    if not useless:
        return None
    for peer, fault in sorted(useless.items()):
        logger.warning("%s is left out: its contribution is %s", peer, fault)
    return AttemptFailed("a contribution is of no use", excluded=useless)
