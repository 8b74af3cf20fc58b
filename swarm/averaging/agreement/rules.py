"""The rules of an attempt: which of the members' equal results counts, who drops what two members count, and what a
leader may say that members gave.

Which earlier result must be finished first is in place, and when a round is complete in watch.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.shares import Counts
from swarm.config import RunConfig
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.tally import NOTHING_GIVEN, Given
from swarm.types import Block, PeerId


def agreed(results: Mapping[PeerId, pb.Prepared], own_id: PeerId) -> pb.Prepared:
    """The result that members of an exchange hold, who all name the same digest. That does not cover the norm: it is
    this peer's own, or if it took no part, the median of theirs."""
    if own_id in results:
        return results[own_id]
    by_norm = sorted(results.values(), key=lambda prepared: prepared.squared_norm)
    return by_norm[(len(by_norm) - 1) // 2]


def given_fault(
    given: Mapping[str, Given], seen: Mapping[str, Given], own_id: str, num_samples: int, num_elements: int,
    config: RunConfig, block: Block,
) -> str:  # fmt: skip
    """What is wrong about what a leader says that a round's members have given, in words that follow "the leader says
    that"; empty if nothing is. `seen` is what this member gave, and what those of its group gave while this one was
    there. `num_samples` and `num_elements` are the result's."""
    # No member sends more than the vector to each other member of its exchanges, and gets in no more than these.
    most_bytes = 2 * len(given) * 4 * num_elements
    for peer, gave in given.items():
        claimed = Counts(num_samples=gave.samples, num_targets=gave.targets, round_samples=gave.samples, norm=0.0)
        if claimed.fault(config, block) or gave.num_bytes > most_bytes:
            return f"{peer} gave more than it can"
    for peer, gave in seen.items():
        told = given.get(peer, NOTHING_GIVEN)
        if told[:2] != gave[:2] or told.num_bytes < gave.num_bytes or (peer == own_id and told != gave):
            return f"{peer} gave something else than it did"
    is_of_all = sum(gave.samples for gave in given.values()) == num_samples
    return "" if is_of_all else f"its members gave other than {num_samples} samples"


def superfluous(begun: Mapping[PeerId, pb.BeginReply], of_round: Container[int]) -> dict[PeerId, set[int]]:
    """The microbatches that each member is to drop: those that another member counts too, and those that are not of the
    round any more, because an amendment that makes rounds shorter came while it went on."""
    drops = duplicates(begun)
    for peer, reply in begun.items():
        if strays := {m for m in messages.unpack_indices(reply.committed_gaps) if m not in of_round}:
            drops[peer] = drops.get(peer, set()) | strays
    return drops


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
