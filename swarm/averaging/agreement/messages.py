"""Small records of averaging and their form on the wire."""

import itertools
import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import MalformedMessage, SwarmError, TryLater
from swarm.honesty.comparison import Deviation
from swarm.machine.words import printable
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.complaints import LONGEST_COMPLAINTS
from swarm.training.round_member import Progress, Snapshot
from swarm.training.run_rounds import next_lineage
from swarm.training.tally import Given, Signature
from swarm.types import LARGEST_COUNT, PeerId

PAST = 16
"""The number of earlier rounds whose lineages a peer sends to others."""
MOST_IDS = 64
"""The most peers that a peer names in one message."""
LONGEST_ID = 64
"""The most characters of a lineage or a peer's id. Bounded, because even those of strangers are kept in memory."""
LONGEST_SIGNATURE = 256
"""The most bytes of a signature over a tally, with its key and digest."""
LONGEST_MEMBER_REASON = 200
"""The most characters of what a member says of others, or of an attempt; also shown."""


class MemberFailed(TryLater):
    """The exchange cannot be completed, and one member seems to be the cause.

    Attributes:
        noticed_by: the member that noticed the failure; others pass the error on.
    """

    def __init__(self, peer_id: str, reason: str, *, noticed_by: str) -> None:
        super().__init__(reason)
        self.peer_id = peer_id
        self.noticed_by = noticed_by

    def anew(self) -> "MemberFailed":
        """Return a copy to be raised in place of this error, which is kept. A raised error refers to the frames that it
        passed through, and so to the vectors of a whole exchange. They would stay in memory until Python collects
        cycles."""
        return MemberFailed(self.peer_id, str(self), noticed_by=self.noticed_by)


@dataclass(frozen=True, order=True)
class Ballot:
    """Names one attempt at a round: its number, then the peer id of its leader."""

    attempt: int
    leader_id: str


class Refused(TryLater):
    """A leader's request is refused. The answer holds the member's promise and round."""


@dataclass(frozen=True, order=True, kw_only=True)
class Standing:
    """Where a peer is in the run. Standings are ordered: when peers of two branches meet, those with the lesser
    standing go to the greater one."""

    run_samples: int
    round: int
    lineage: str


def lineage_after(previous: str, outcome: pb.Outcome) -> str:
    """The lineage of a peer that has applied a round's outcome."""
    prepared = outcome.prepared
    return next_lineage(
        previous, outcome.round, prepared.digest, prepared.member_ids, total_squared_norm=outcome.total_squared_norm,
        partners=digests_of(outcome.partners), amended=prepared.amended,
    )  # fmt: skip


def digests_of(partners: Iterable[pb.Partner]) -> tuple[str, ...]:
    """The digests of the averages that were added up because stages have tied parameters."""
    return tuple(partner.digest for partner in partners)


def standing_of(state: Progress | Snapshot) -> Standing:
    """Where a member stands, or will stand once it has installed a snapshot."""
    return Standing(run_samples=state.run_samples, round=state.round, lineage=state.lineage)


def pack_given(given: Mapping[str, Given], members: Iterable[str]) -> list[pb.Given]:
    rows = (given[peer] for peer in members)
    return [pb.Given(samples=row.samples, targets=row.targets, bytes=row.num_bytes) for row in rows]


def unpack_given(message: pb.Prepared | pb.AverageRequest) -> dict[str, Given]:
    """What each of the members that a message names has given. Empty if it does not say it of every one."""
    if len(message.given) != len(message.member_ids):
        return {}
    rows = zip(message.member_ids, message.given, strict=True)
    return {peer: Given(row.samples, row.targets, row.bytes, 1) for peer, row in rows}


def unpack_signatures(prepared: pb.Prepared) -> list[Signature]:
    """The signatures over the tally after a round. Those that are too long to be any are left out."""
    told = filter(is_short, prepared.signatures)
    return [Signature(each.point, each.signature, each.tally, each.complaints) for each in told]


def is_short(signed: pb.TallySignature) -> bool:
    length = len(signed.point) + len(signed.signature) + len(signed.tally)
    return length <= LONGEST_SIGNATURE and len(signed.complaints) <= LONGEST_COMPLAINTS


def unsigned(prepared: pb.Prepared) -> pb.Prepared:
    copy = pb.Prepared()
    copy.CopyFrom(prepared)
    del copy.signatures[:]
    return copy


def signed_by_all(prepared: pb.Prepared, held: Iterable[pb.Prepared]) -> pb.Prepared:
    """A result with the signature of each member that holds it."""
    signed = unsigned(prepared)
    signed.signatures.extend(filter(is_short, (signature for each in held for signature in each.signatures[:1])))
    return signed


def pack_standing(standing: Standing) -> pb.Standing:
    return pb.Standing(round=standing.round, run_samples=standing.run_samples, lineage=standing.lineage)


def unpack_standing(message: pb.Standing) -> Standing:
    """A standing, read from its wire form. Raises MalformedMessage for a lineage that is too long."""
    _require_short(message.lineage, "a lineage")
    return Standing(round=message.round, run_samples=message.run_samples, lineage=message.lineage)


def unpack_past(lineages: Sequence[str]) -> tuple[str, ...]:
    """The last PAST lineages of the rounds before a peer's own, read from its message, oldest first.

    Raises MalformedMessage for a lineage that is too long.
    """
    told = tuple(lineages[-PAST:])
    for lineage in told:
        _require_short(lineage, "a lineage")
    return told


def unpack_ids(ids: Sequence[str]) -> list[PeerId]:
    """The first MOST_IDS of these peers. Raises MalformedMessage for an id that is too long."""
    for peer_id in ids[:MOST_IDS]:
        _require_short(peer_id, "a leader's id")
    return [PeerId(peer_id) for peer_id in ids[:MOST_IDS]]


def pack_ballot(ballot: Ballot | None) -> pb.Ballot | None:
    return None if ballot is None else pb.Ballot(attempt=ballot.attempt, leader_id=ballot.leader_id)


def unpack_ballot(message: pb.Ballot) -> Ballot | None:
    """A ballot, read from its wire form; None for a field that was left out, since attempts are numbered from 1.

    Raises MalformedMessage for a leader's id that is too long.
    """
    _require_short(message.leader_id, "a leader's id")
    return Ballot(message.attempt, message.leader_id) if message.attempt else None


def require_ballot(message: pb.Ballot) -> Ballot:
    """A ballot, read from its wire form. Raises MalformedMessage for a missing one."""
    ballot = unpack_ballot(message)
    if ballot is None:
        raise MalformedMessage("the request names no attempt")
    return ballot


def own_ballot(request: pb.BeginRequest | pb.AverageRequest | pb.AbortRequest) -> Ballot:
    """The attempt that a leader calls about. Raises MalformedMessage if it is missing or another leader's."""
    ballot = require_ballot(request.ballot)
    if ballot.leader_id != request.peer_id:
        raise MalformedMessage(f"attempt {ballot.attempt} is not that of the caller")
    return ballot


def _require_short(text: str, what: str) -> None:
    if len(text) > LONGEST_ID:
        raise MalformedMessage(f"{what} has {len(text)} characters, at most {LONGEST_ID} are taken")


def pack_failure(failed: MemberFailed) -> pb.Failure:
    return pb.Failure(blamed_id=failed.peer_id, reason=str(failed), noticed_by_id=failed.noticed_by)


def unpack_failure(failure: pb.Failure) -> MemberFailed:
    """The inverse of `pack_failure`, with ids and a reason that are short enough to be logged and passed on."""
    reason = unpack_reason(failure.reason)
    return MemberFailed(failure.blamed_id[:LONGEST_ID], reason, noticed_by=failure.noticed_by_id[:LONGEST_ID])


def unpack_reason(reason: str) -> str:
    return printable(reason[:LONGEST_MEMBER_REASON])


def pack_deviations(deviations: Iterable[Deviation]) -> list[pb.Deviation]:
    return [
        pb.Deviation(
            peer_id=each.peer_id, reason=each.reason, is_computed=each.is_computed, is_clear=each.is_clear
        )
        for each in deviations
    ]  # fmt: skip


def unpack_deviations(told: Sequence[pb.Deviation]) -> list[Deviation]:
    """The first MOST_IDS of these, with reasons that may be shown. Raises MalformedMessage for an id that is too
    long."""
    unpack_ids([deviation.peer_id for deviation in told])
    return [
        Deviation(
            peer_id=each.peer_id, reason=unpack_reason(each.reason), is_computed=each.is_computed,
            is_clear=each.is_clear,
        )
        for each in told[:MOST_IDS]
    ]  # fmt: skip


def pack_indices(indices: Collection[int]) -> list[int]:
    """A set of microbatches as the gaps between them: most gaps are 1 and take one byte."""
    return [index - previous for previous, index in itertools.pairwise([-1, *sorted(indices)])]


def unpack_indices(gaps: Iterable[int]) -> frozenset[int]:
    """The inverse of `pack_indices`. Raises MalformedMessage for indices beyond LARGEST_COUNT."""
    indices = frozenset(itertools.accumulate(gaps, initial=-1)) - {-1}
    if max(indices, default=0) > LARGEST_COUNT:
        raise MalformedMessage(f"a microbatch beyond {LARGEST_COUNT} is named")
    return indices


def unpack_indices_of(round_indices: Container[int], gaps: Iterable[int]) -> frozenset[int]:
    """Like `unpack_indices`, but leaves out indices that do not belong to the round."""
    return frozenset(index for index in itertools.accumulate(gaps, initial=-1) if index in round_indices)


def checked_begin(reply: pb.BeginReply | SwarmError) -> pb.BeginReply | SwarmError:
    """Return a member's answer, or MalformedMessage if the answer makes no sense."""
    if isinstance(reply, SwarmError) or reply.HasField("refusal") or reply.HasField("closing"):
        return reply
    try:
        unpack_indices(reply.committed_gaps)
        require_ballot(reply.since)
        if reply.HasField("prepared"):
            require_ballot(reply.prepared.ballot)
    except MalformedMessage as error:
        return error
    return reply


def checked_average(reply: pb.AverageReply | SwarmError) -> pb.AverageReply | SwarmError:
    """Return a member's answer, or MalformedMessage if the answer says nothing, or names an impossible result."""
    if isinstance(reply, SwarmError) or reply.HasField("refusal") or reply.HasField("failure"):
        return reply
    if not (reply.prepared.digest and 0.0 <= reply.prepared.squared_norm < math.inf):
        return MalformedMessage("its answer names no result that can be")
    return reply
