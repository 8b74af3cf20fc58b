"""Who gives up what, where several members of a synchronous round count the same microbatch.

As when one was away, what it had was replayed by others, and it comes back. Used by averaging/leader, as it begins an
attempt. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from swarm.averaging import messages
from swarm.averaging.view import committed_elsewhere
from swarm.rounds import Progress
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

_Sum = tuple[PeerId, bool]
"""A member's sum of spare replays, or (False) of the rest."""


def spare_doubles(progress: Mapping[PeerId, Progress]) -> dict[PeerId, Set[int]]:
    """By member, its spare replays, if others have told that they have all of them.

    Taken out at once and together they cost nothing, with those among them that nobody has acknowledged yet; each of
    these, taken out by itself before the others, a forward and a backward.
    """
    return {
        peer: own.spare
        for peer, own in progress.items()
        if own.spare and own.spare <= committed_elsewhere(peer, progress)
    }


def duplicates(begun: Mapping[PeerId, pb.BeginReply]) -> dict[PeerId, set[int]]:
    """By member, the microbatches that it is to give up, since another counts them as well.

    A member has two sums, one of its spare replays and one of the rest. Each microbatch that leaves a sum costs a
    forward and a backward, or each one that stays, whichever are fewer. So a sum that can be emptied, or nearly, gives
    up all that it can, if the longest work of a member gets shorter by that, or that of all together; the members
    share the others.
    """
    sums = {
        (peer, is_spare): indices
        for peer, reply in sorted(begun.items())
        for is_spare, indices in zip((True, False), _sums(reply), strict=True)
    }
    num_holders = Counter(index for indices in sums.values() for index in indices)
    doubles = {key: {index for index in indices if num_holders[index] > 1} for key, indices in sums.items()}
    emptied: list[_Sum] = []
    drops = _shared(doubles, num_holders, emptied)
    # Who was away may have only what was replayed meanwhile; and spare replays are dropped before anything else.
    for key in sorted(filter(doubles.get, sums), key=lambda key: (len(sums[key]) - len(doubles[key]), not key[1])):
        others = _shared(doubles, num_holders, [*emptied, key])
        if _work(sums, others) < _work(sums, drops):
            emptied, drops = [*emptied, key], others
    merged: dict[PeerId, set[int]] = {}
    for (peer, _), indices in drops.items():
        if indices:
            merged.setdefault(peer, set()).update(indices)
    return merged


def _sums(reply: pb.BeginReply) -> tuple[Set[int], Set[int]]:
    """Spare replays, and the rest."""
    committed, spare = messages.unpack_indices(reply.committed_gaps), messages.unpack_indices(reply.spare_gaps)
    return committed & spare, committed - spare


def _shared(
    doubles: Mapping[_Sum, Set[int]], num_holders: Mapping[int, int], emptied: Iterable[_Sum]
) -> dict[_Sum, set[int]]:  # fmt: skip
    """What each sum gives up: some all that they can, the members the others in equal parts."""
    num_left, drops = Counter(num_holders), {key: set[int]() for key in doubles}
    for key in emptied:
        drops[key] = {index for index in doubles[key] if num_left[index] > 1}
        num_left.subtract(drops[key])
    num_taken_out = Counter[PeerId]()
    for index in sorted(index for index, number in num_left.items() if number > 1):
        holders = [key for key, indices in doubles.items() if index in indices and index not in drops[key]]
        holders.remove(max(holders, key=lambda key: num_taken_out[key[0]]))
        for key in holders:
            num_taken_out[key[0]] += 1
            drops[key].add(index)
    return drops


def _work(sums: Mapping[_Sum, Set[int]], drops: Mapping[_Sum, Set[int]]) -> tuple[int, int]:
    """Microbatches to compute again: by the member with the most, and by all."""
    by_member = Counter[PeerId]()
    for key, indices in drops.items():
        by_member[key[0]] += min(len(indices), len(sums[key]) - len(indices))
    return max(by_member.values(), default=0), by_member.total()
