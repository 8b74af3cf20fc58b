"""Who gives up what, where several members of a synchronous round count the same microbatch.

As when one was away, what it had was replayed by others, and it comes back. Used by averaging/leader, as it begins an
attempt. Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from swarm.averaging import messages
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress
from swarm.types import PeerId

_Sum = tuple[PeerId, bool]
"""A member's sum of spare replays, or (False) of the rest."""


def spare_doubles(progress: Mapping[PeerId, Progress]) -> dict[PeerId, Set[int]]:
    """By member, its spare replays, if others have told that they have all of them.

    Taken out at once and together they cost nothing, with those among them that nobody has acknowledged yet; each of
    these, taken out by itself before the others, a forward and a backward.
    """
    return {peer: own.spare for peer, own in progress.items() if own.spare and own.spare <= _elsewhere(peer, progress)}


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
    holders: dict[int, list[_Sum]] = {}
    for key, indices in sums.items():
        for index in indices:
            holders.setdefault(index, []).append(key)
    holders = {index: holders[index] for index in sorted(holders) if len(holders[index]) > 1}
    doubles = Counter(key for keys in holders.values() for key in keys)
    emptied: list[_Sum] = []
    drops = _shared(holders, emptied)
    # Who was away may have only what was replayed meanwhile; and spare replays are dropped before anything else.
    nearly = [key for key, number in doubles.items() if 2 * number > len(sums[key])]
    for key in sorted(nearly, key=lambda key: (len(sums[key]) - doubles[key], not key[1], key)):
        others = _shared(holders, [*emptied, key])
        if _work(sums, others) < _work(sums, drops):
            emptied, drops = [*emptied, key], others
    merged: dict[PeerId, set[int]] = {}
    for (peer, _), indices in drops.items():
        merged.setdefault(peer, set()).update(indices)
    return merged


def _elsewhere(peer_id: PeerId, progress: Mapping[PeerId, Progress]) -> frozenset[int]:
    """What other members have told of, spare replays left aside."""
    others = (theirs for other, theirs in progress.items() if other != peer_id)
    return frozenset[int]().union(*(theirs.committed - theirs.spare for theirs in others))


def _sums(reply: pb.BeginReply) -> tuple[Set[int], Set[int]]:
    """Spare replays, and the rest."""
    committed, spare = messages.unpack_indices(reply.committed_gaps), messages.unpack_indices(reply.spare_gaps)
    return committed & spare, committed - spare


def _shared(holders: Mapping[int, Sequence[_Sum]], emptied: Sequence[_Sum]) -> dict[_Sum, set[int]]:
    """What each sum gives up: some all that they can, one before the other; of the rest, the members equal parts."""
    drops: dict[_Sum, set[int]] = {}
    num_taken_out = Counter[PeerId]()
    for index, keys in holders.items():
        staying = [key for key in keys if key not in emptied] or [max(keys, key=emptied.index)]
        keeper = max(staying, key=lambda key: num_taken_out[key[0]])
        num_taken_out.update(peer for peer, _ in staying if peer != keeper[0])
        for key in keys:
            if key != keeper:
                drops.setdefault(key, set()).add(index)
    return drops


def _work(sums: Mapping[_Sum, Set[int]], drops: Mapping[_Sum, Set[int]]) -> tuple[int, int]:
    """Microbatches to compute again: by the member with the most, and by all."""
    by_member = Counter[PeerId]()
    for key, indices in drops.items():
        by_member[key[0]] += min(len(indices), len(sums[key]) - len(indices))
    return max(by_member.values(), default=0), by_member.total()
