"""Which member drops a microbatch that several members of a synchronous round count.

Duplicates arise when a member was away, others replayed its microbatches, and it comes back. Used by leading/beginning.
Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from swarm.averaging import messages
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId


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
