"""Which member gives up what, where several members of a synchronous round count the same microbatch.

That happens when a member was away, others replayed what it had, and it comes back. Used by leading/beginning. Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from swarm.averaging import messages
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId


def duplicates(begun: Mapping[PeerId, pb.BeginReply]) -> dict[PeerId, set[int]]:
    """The microbatches that each member is to give up, since another one counts them as well.

    A member has to compute again the microbatches that leave its sum, or those that stay, whichever are fewer. So a
    member that can give up most of its sum gives up all that it can, if that shortens the work of the member with
    the most, or else the work of all together. The other microbatches are divided equally.
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
    # While a member was away, others may have replayed nearly all that it counts: see whether it had better give up
    # everything.
    nearly = [peer for peer, number in doubles.items() if 2 * number > len(held[peer])]
    for peer in sorted(nearly, key=lambda peer: (len(held[peer]) - doubles[peer], peer)):
        others = _shared(holders, [*emptied, peer])
        if _work(held, others) < _work(held, drops):
            emptied, drops = [*emptied, peer], others
    return drops


def _shared(holders: Mapping[int, Sequence[PeerId]], emptied: Sequence[PeerId]) -> dict[PeerId, set[int]]:
    """What each member gives up: each emptied one, in order, all that it can; the other members divide the rest
    equally."""
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
    """Microbatches to compute again: by the member with the most, and by all."""
    by_member = [min(len(indices), len(held[peer]) - len(indices)) for peer, indices in drops.items()]
    return max(by_member, default=0), sum(by_member)
