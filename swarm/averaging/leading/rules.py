"""The rules of a group's rounds: which peer leads, when a round is complete, which members may commit it, and which
earlier result has to be finished first.

Used by the parts of an averager, by members/roster and leading/barrier, and by a peer that wants to leave its stage.
Pure.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar, assert_never

from swarm.averaging import messages
from swarm.config import Quorum, RunConfig
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

Begun = Mapping[PeerId, pb.BeginReply]
"""The answers of the members that began an attempt."""

_Id = TypeVar("_Id", bound=str)


def leader_of(peer_ids: Iterable[_Id]) -> _Id:
    """The leader of these peers of a stage: the one with the lowest id. There must be one at least.

    Roster.leader says which peers these are.
    """
    return min(peer_ids)


def is_complete(
    config: RunConfig,
    round_number: int,
    committed: Collection[int],
    num_samples: int,
    *,
    absent_samples: int = 0,
    is_late: Callable[[], bool] = lambda: False,
) -> bool:
    """Whether a group holds everything that a round needs.

    Synchronous: all its microbatches. DiLoCo: its number of samples. But a stage that lost samples with a peer ends its
    round early when it is late, or else it would stay behind the others for ever. A stage that shares a block with it
    cannot get ahead: it waits, and admits no more samples once it has enough for a round.

    With DiLoCo, a round that has its samples is not committed while the members that would be left out hold more
    samples of it than the others. A round that ends early leaves no living member out. Otherwise a newcomer with one
    inner step could commit a round without the member that has nearly all samples of it.

    Args:
        committed: microbatches of the members that would commit the round.
        num_samples: samples of the members that would commit the round.
        absent_samples: samples of the round at living members that would be left out.
        is_late: tells whether another stage is at a later round, or has waited long for this stage to decide. Called
            only when needed.
    """
    if config.rounds.synchronous:
        return all(index in committed for index in config.microbatches_of(round_number))
    if num_samples >= config.rounds.round_samples:
        return num_samples >= absent_samples
    return absent_samples == 0 < num_samples and is_late()


def has_quorum(
    quorum: Quorum, present: Collection[str], *, last_members: Collection[str], announced: Callable[[], Collection[str]]
) -> bool:
    """Whether the peers that are present may commit a round.

    With a majority, two parts of a group cannot both commit the same round. The exception is a member that is started
    again: it forgets what it had prepared, and may join the majority for another result of that round.

    Args:
        last_members: the members of the last round; empty for a peer that knows of none. If a majority is wanted, most
            of them must be present.
        announced: gives all peers of the stage in the directory, including this one. Called only if no last round is
            known.
    """
    match quorum:
        case "available":
            return True
        case "majority":
            electorate = set(last_members or announced())
            return 2 * len(electorate & set(present)) > len(electorate)
        case other:
            assert_never(other)


def agreed(results: Mapping[PeerId, pb.Prepared], own_id: PeerId) -> pb.Prepared:
    """The result that members of an exchange hold, who all name the same digest. That does not cover the norm: it is
    this peer's own, or if it took no part, the median of theirs."""
    if own_id in results:
        return results[own_id]
    by_norm = sorted(results.values(), key=lambda prepared: prepared.squared_norm)
    return by_norm[(len(by_norm) - 1) // 2]


def unfinished(begun: Begun) -> pb.Prepared | None:
    """The newest result of an earlier attempt, if it may have been decided; else None. It cannot have been decided if a
    member of its exchange did not prepare it."""
    prepared = [reply.prepared for reply in begun.values() if reply.HasField("prepared")]
    if not prepared:
        return None
    newest = max(prepared, key=lambda p: messages.require_ballot(p.ballot))
    ballot = messages.require_ballot(newest.ballot)
    for peer in newest.member_ids:
        reply = begun.get(PeerId(peer))
        # The answer of a member that was restarted since does not count: it may have prepared the result and forgotten
        # it.
        if (
            reply is not None
            and reply.prepared.digest != newest.digest
            and messages.require_ballot(reply.since) <= ballot
        ):
            return None
    return newest
