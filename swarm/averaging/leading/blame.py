"""Why an attempt came to nothing, which members the next one leaves out, and how much longer that one waits.

Used by leading/leader and leading/beginning. Pure.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from swarm.averaging import messages
from swarm.averaging.leading.group import Ballot
from swarm.errors import DeadlineExceeded, Overloaded, PeerUnavailable, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MOST_THROUGH_ONE = 8
"""The largest group in which one member may sum everything, where lines between the others are missing: it carries all
that they send."""
SLOW = DeadlineExceeded, Overloaded
"""The first errors of these kinds only double the deadlines."""
MOST_DOUBLINGS = 3


class AttemptFailed(Exception):
    """Nothing was decided; the attempt is aborted. Does not leave this package."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.unreachable: set[PeerId] = set()
        self.excluded: set[PeerId] = set()
        """Members that are alive, but make attempts fail."""
        self.refused: set[PeerId] = set()
        self.promised_attempt = 0
        self.void = False
        """Whether results of earlier attempts were not decided and never will be."""


class Blame:
    """What one leader has concluded from the attempts that failed.

    Attributes:
        num_timeouts: time-outs in a row; every one doubles the deadlines, up to MOST_DOUBLINGS times.
    """

    def __init__(self, own_id: PeerId) -> None:
        self._own_id = own_id
        self._round_through_one: int | None = None
        """The round in which a line between two members failed: its members exchange through this peer alone."""
        self.num_timeouts = 0

    # -- how much longer the next attempt waits ----------------------------------------------------------------------

    def deadline(self, floor: float, measured: float) -> float:
        """The deadline in seconds for a step that last took `measured` seconds; never below `floor`."""
        return (floor + 3 * measured) * float(2 ** min(MOST_DOUBLINGS, self.num_timeouts))

    def is_first_timeout(self, timed_out: bool) -> bool:
        """Count a time-out. Returns whether it is the first in a row, which only doubles the deadlines."""
        self.num_timeouts += timed_out
        return timed_out and self.num_timeouts == 1

    def exchanged(self) -> None:
        """Note that an exchange was done in time."""
        self.num_timeouts = 0

    # -- which members the next attempt leaves out -------------------------------------------------------------------

    def failure(self, reason: str, replies: Mapping[PeerId, Any]) -> AttemptFailed:
        """The error which says that nothing is decided, and which members will be left out of the next attempt.

        These are members that answered with an error, because they would do so again, and from the second time-out in a
        row on also those that are slow. Both are alive and go on reporting, so the stage would wait for them for good.
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
            logger.warning("left out, since it failed or is slow: %s", ", ".join(sorted(failed.excluded)))
        return failed

    def failed_exchange(
        self,
        replies: Mapping[PeerId, Any],
        members: Collection[PeerId],
        round_number: int,
        ballot: Ballot,
        *,
        took_long: bool,
    ) -> AttemptFailed:
        """Like `failure`, for an exchange, in which members also name others from which they got nothing.

        Args:
            took_long: whether it took so long that an owner may have waited for another member in vain.
        """
        # Keyed by the member that noticed the failure: others pass on what they were told.
        accusations = {
            PeerId(reply.failure.noticed_by_id): reply.failure
            for reply in replies.values()
            if isinstance(reply, pb.AverageReply) and reply.HasField("failure")
        }
        is_explained = bool(accusations) or any(isinstance(reply, PeerUnavailable) for reply in replies.values())
        is_first = self.is_first_timeout(took_long or not is_explained)
        failed = self.failure("the exchange failed", replies)
        if not (is_explained or is_first or took_long):
            # Refusals twice in a row are no accident. If the exchange took long, they only say that its time was over.
            failed.excluded |= _refusing(replies, ballot)
        if failed.unreachable or failed.excluded or is_first or not accusations:
            return failed
        counts = Counter(PeerId(failure.blamed_id) for failure in accusations.values())
        blamed, _ = counts.most_common(1)[0]
        accusers = {accuser: failure for accuser, failure in accusations.items() if failure.blamed_id == blamed}
        logger.warning("the exchange failed because of %s: %s", blamed, next(iter(accusers.values())).reason)
        if self._can_sum_all(members) and self._own_id not in counts.keys() | accusations.keys():
            # The connection between two others is at fault. Both have just answered this peer, so neither is left out.
            self._round_through_one = round_number
            return failed
        # Where members accuse the leader, which itself noticed nothing, these members are cut off.
        is_cut_off = blamed == self._own_id and self._own_id not in accusers
        failed.excluded = set(accusers) if is_cut_off else {blamed}
        return failed

    def goes_through_one(self, round_number: int, members: Collection[PeerId]) -> bool:
        """Whether the leader sums everything, since two members of this round do not reach each other."""
        return round_number == self._round_through_one and self._can_sum_all(members)

    def _can_sum_all(self, members: Collection[PeerId]) -> bool:
        return self._own_id in members and 2 < len(members) <= MOST_THROUGH_ONE


def _refusing(replies: Mapping[PeerId, Any], ballot: Ballot) -> set[PeerId]:
    """Members that refuse this very attempt, though they have promised no other since."""
    promised = messages.pack_ballot(ballot)
    return {
        peer
        for peer, reply in replies.items()
        if isinstance(reply, pb.AverageReply) and reply.HasField("refusal") and reply.refusal.promised == promised
    }


def without_the_useless(
    begun: Mapping[PeerId, pb.BeginReply], num_elements: int, sequence_length: int
) -> AttemptFailed | None:
    """The error which says that members closed with contributions of no use, and are left out; None if there are none.

    Args:
        num_elements: how many elements a contribution has.
        sequence_length: targets that a sample has at most.
    """
    useless = {
        peer: fault
        for peer, reply in begun.items()
        for fault, is_so in (
            ("not finite", not math.isfinite(reply.norm)),
            ("of a norm below zero", reply.norm < 0.0),
            ("of another size", reply.num_elements != num_elements),
            ("of no samples, and some count towards the round", reply.num_samples == 0 < reply.round_samples),
            ("of more targets than its samples can have", reply.num_targets > reply.num_samples * sequence_length),
        )
        if is_so
    }
    if not useless:
        return None
    for peer, fault in sorted(useless.items()):
        logger.warning("%s is left out: its contribution is %s", peer, fault)
    failed = AttemptFailed("a contribution is of no use")
    failed.excluded = set(useless)
    return failed
