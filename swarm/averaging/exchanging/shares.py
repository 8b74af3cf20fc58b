"""The members of an exchange: the weight with which each takes part, and the part of the vector that it owns. Pure.

The leader works the shares out with `divide`; every member, the leader included, gets them with the Average call and
checks that they are sound.
"""

import hashlib
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from swarm.errors import MalformedMessage
from swarm.rpc.v1 import averaging_pb2 as pb

BANDWIDTH_NOISE = 1.5
"""Bandwidths that differ by less than this factor count as equal: on a fast network that much is noise."""
PLAUSIBLE_BANDWIDTHS = 1.0, 1e12
"""Bytes a second; a line that is said to have more or less counts as not measured."""
BANDWIDTH_RANGE = 8.0
"""A line counts for at most this multiple of the median, and for at least the inverse, because members may lie."""
ROUNDING = 1e-6
"""By how much the sum of all weights may be off."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One member.

    Attributes:
        num_samples: the samples in its contribution. A member with none sends nothing, but gets the result.
        round_samples: of these, the ones that count towards the round.
        weight: what its contribution is multiplied by in the sum.
        num_elements: how many elements the part has that it owns.
    """

    peer_id: str
    num_samples: int
    round_samples: int
    weight: float
    num_elements: int


@dataclass(frozen=True)
class Shares:
    """The shares of all members, in the same order at every member: contributions are summed in this order, and the
    members' parts of the vector lie in it."""

    members: tuple[Share, ...]

    def __post_init__(self) -> None:
        if len({share.peer_id for share in self.members}) < len(self.members):
            raise MalformedMessage("a member is named twice")
        if not all(0.0 <= share.weight <= 1.0 for share in self.members):
            raise MalformedMessage("a member's weight is not between 0 and 1")
        if sum(share.weight for share in self.members) > 1.0 + ROUNDING:
            raise MalformedMessage("the members' weights add up to more than 1")

    @property
    def num_elements(self) -> int:
        """Length of the whole vector."""
        return sum(share.num_elements for share in self.members)

    @property
    def round_samples(self) -> int:
        """Samples of the round."""
        return sum(share.round_samples for share in self.members)

    @cached_property
    def parts(self) -> list[slice]:
        """The part of each member."""
        ends = list(itertools.accumulate((share.num_elements for share in self.members), initial=0))
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    @property
    def has_one_owner(self) -> bool:
        """Whether one member sums the whole vector."""
        return sum(share.num_elements > 0 for share in self.members) == 1

    @property
    def senders(self) -> list[Share]:
        """The members that contribute."""
        return [share for share in self.members if share.num_samples]

    def of(self, peer_id: str) -> Share:
        """A member's share. Raises MalformedMessage for a peer that is no member."""
        for share in self.members:
            if share.peer_id == peer_id:
                return share
        raise MalformedMessage(f"{peer_id} is no member of this exchange")

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all shares, in hexadecimal."""
        lines = (
            f"{s.peer_id} {s.num_samples} {s.round_samples} {s.weight.hex()} {s.num_elements}" for s in self.members
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def divide(
    begun: Mapping[str, pb.BeginReply],
    *,
    num_elements: int,
    tile: int,
    clip_to_median: float,
    only_owner: str | None = None,
) -> Shares:
    """Weigh the members and cut the vector into their parts.

    Args:
        begun: what each member told when it closed its contribution, in the members' order.
        num_elements: length of the vector.
        tile: the length of each part but the last one is a multiple of this.
        clip_to_median: a contribution counts for less if its norm is above this multiple of the median; 0 turns that
            off.
        only_owner: the member that owns the whole vector, so that no two others need a line between them.
    """
    weights = _weights(begun.values(), clip_to_median)
    if only_owner is None:
        sizes = part_sizes(num_elements, [reply.bytes_per_second for reply in begun.values()], tile=tile)
    else:
        sizes = [num_elements * (peer_id == only_owner) for peer_id in begun]
    members = (
        Share(
            peer_id=peer_id,
            num_samples=reply.num_samples,
            round_samples=reply.round_samples,
            weight=weight,
            num_elements=size,
        )
        for (peer_id, reply), weight, size in zip(begun.items(), weights, sizes, strict=True)
    )
    return Shares(tuple(members))


def _weights(begun: Collection[pb.BeginReply], clip_to_median: float) -> list[float]:
    """The weight of each member: its part of all targets, so that the weighted sum of means is the mean over all of
    them."""
    assert any(reply.num_samples for reply in begun), "a round without samples is never averaged"
    # Without any target all gradients are 0; what steps changed all the same (by decay, say) is averaged by samples.
    has_targets = any(reply.num_targets for reply in begun)
    amounts = [reply.num_targets if has_targets else reply.num_samples for reply in begun]
    median = statistics.median(reply.norm for reply in begun if reply.num_samples)
    limit = clip_to_median * median if clip_to_median and median else math.inf
    return [
        amount / sum(amounts) * min(1.0, limit / max(reply.norm, 1e-300))
        for reply, amount in zip(begun, amounts, strict=True)
    ]


def part_sizes(num_elements: int, bandwidths: Sequence[float], *, tile: int) -> list[int]:
    """Lengths of the parts with which all members are done at the same time.

    Of a vector of D elements among M members, the owner of P elements sends D - P of its own and its part's result
    M - 1 times: D + (M - 2) P. The parts that make D + (M - 2) P over the bandwidth equal for all, or as nearly as a
    slow line allows, are found by filling up from the fastest line. Between two members no division helps.
    """
    num_members = len(bandwidths)
    low, high = PLAUSIBLE_BANDWIDTHS
    known = [bandwidth for bandwidth in bandwidths if low <= bandwidth <= high]
    shares = [1.0 / num_members] * num_members
    if num_members > 2 and known and max(known) > BANDWIDTH_NOISE * min(known):
        median = statistics.median(known)
        told = [bandwidth if low <= bandwidth <= high else median for bandwidth in bandwidths]
        lines = [min(median * BANDWIDTH_RANGE, max(median / BANDWIDTH_RANGE, bandwidth)) for bandwidth in told]
        shares = _fill(lines)
    ends = [round(end * num_elements / tile) * tile for end in itertools.accumulate(shares, initial=0.0)]
    ends = [min(end, num_elements) for end in ends[:-1]] + [num_elements]
    return [end - start for start, end in itertools.pairwise(ends)]


def _fill(lines: Sequence[float]) -> list[float]:
    """Shares p of 1 with (1 + (M - 2) p) / line equal wherever p > 0, and no smaller where p = 0."""
    extra = len(lines) - 2
    fastest = sorted(lines, reverse=True)
    for count in range(len(lines), 0, -1):
        # All of the `count` fastest take part: sum((time * line - 1) / extra) = 1.
        time = (extra + count) / sum(fastest[:count])
        if time * fastest[count - 1] >= 1.0:
            break
    return [max(0.0, (time * line - 1.0) / extra) for line in lines]
