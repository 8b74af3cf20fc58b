"""The members of an exchange: the weight with which each takes part, and the part of the vector that it owns.

The leader computes the shares with `divide`. Every member, including the leader, gets them with the Average call,
checks their counts, and computes the weights for itself (`shares_of`). So no member counts for more than a round can
hold, and no leader can give a member another weight than all members' counts do.
"""

import hashlib
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from swarm.averaging.agreement import messages
from swarm.config import RunConfig
from swarm.errors import MalformedMessage
from swarm.honesty.comparison import LEAST_MEMBERS
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Contribution
from swarm.training.tally import Given
from swarm.types import Block

BANDWIDTH_NOISE = 1.5
"""Bandwidths that differ by less than this factor count as equal, because on a fast network such differences are
noise."""
PLAUSIBLE_BANDWIDTHS = 1.0, 1e12
"""The least and the largest bandwidth that is believed, in bytes a second. A line that reports more or less counts as
not measured."""
BANDWIDTH_RANGE = 8.0
"""A line's bandwidth counts as at most this multiple of the median, and at least the median divided by it, because
members may lie."""
LEAST_PART, LARGEST_PART = 1 / 16, 2.0
"""What a member owns at least and at most where members can be compared, as a multiple of the even part."""
_HALVINGS = 100
COUNTED_ROUNDS = 2
"""With DiLoCo, the most samples of one member that count towards a round, in rounds. A peer goes on while a round ends,
so it may have somewhat more than one."""
LATE_ROUNDS = 5
"""With DiLoCo, the rounds whose samples a contribution may hold, each up to COUNTED_ROUNDS: those that a peer missed
and this one; or with fragments, those since the fragment was averaged last."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a member says of its contribution.

    Attributes:
        num_samples: the samples in the contribution. A member without samples sends nothing, but gets the result.
        num_targets: the targets in these samples; its weight.
        round_samples: the samples among these that count towards the round.
        norm: the contribution's norm.
    """

    num_samples: int
    num_targets: int
    round_samples: int
    norm: float

    @classmethod
    def of(cls, message: pb.BeginReply | pb.Share | Contribution, norm: float) -> "Counts":
        """The counts that a message, or a contribution, has in fields of the same names."""
        return cls(
            num_samples=message.num_samples,
            num_targets=message.num_targets,
            round_samples=message.round_samples,
            norm=norm,
        )

    @classmethod
    def total(cls, counts: Collection["Counts"], norm: float) -> "Counts":
        """The counts of an average over members with these counts. `norm` is the average's."""
        return cls(
            num_samples=sum(each.num_samples for each in counts),
            num_targets=sum(each.num_targets for each in counts),
            round_samples=sum(each.round_samples for each in counts),
            norm=norm,
        )

    def bounded(self, config: RunConfig, block: Block, num_members: int = 1) -> "Counts":
        """These counts, cut to the most that so many members can have."""
        most = num_members * most_samples(config, block)
        num_samples = min(self.num_samples, most_rounds(config) * most)
        return Counts(
            num_samples=num_samples,
            num_targets=self.num_targets * num_samples // max(1, self.num_samples),
            round_samples=min(self.round_samples, num_samples, most),
            norm=self.norm,
        )

    def fault(self, config: RunConfig, block: Block, num_members: int = 1) -> str:
        """What is impossible about the counts of so many members, in words that follow "its contribution is"; empty if
        nothing is."""
        bounded = self.bounded(config, block, num_members)
        faults = (
            ("not finite", not math.isfinite(self.norm)),
            ("of a norm below zero", self.norm < 0.0),
            ("of no samples, although some count towards the round", self.num_samples == 0 < self.round_samples),
            (
                "of more targets than its samples can have",
                self.num_targets > self.num_samples * config.data.sequence_length,
            ),
            (
                "of more samples than a round can hold",
                (self.num_samples, self.round_samples) != (bounded.num_samples, bounded.round_samples),
            ),
        )
        return next((fault for fault, is_so in faults if is_so), "")


def most_samples(config: RunConfig, block: Block) -> int:
    return config.round_samples_of(block) * counted_rounds(config)


def counted_rounds(config: RunConfig) -> int:
    """As how many rounds the samples of one member count at most."""
    return 1 if config.rounds.synchronous else COUNTED_ROUNDS


def most_rounds(config: RunConfig) -> int:
    return 1 if config.rounds.synchronous else max(LATE_ROUNDS, config.averaging.num_fragments)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One member.

    Attributes:
        weight: the factor of its contribution in the sum.
        num_elements: the length of the part that the member owns.
    """

    peer_id: str
    counts: Counts
    weight: float
    num_elements: int

    @property
    def contributes(self) -> bool:
        return self.counts.num_samples > 0


@dataclass(frozen=True)
class Shares:
    """The shares of all members, in the same order at every member. Contributions are summed in this order, and the
    parts follow one another in this order. `amended` is the digest of the newest amendment that is in force in the
    round; empty if there is none."""

    members: tuple[Share, ...]
    amended: str = ""

    def __post_init__(self) -> None:
        if len({share.peer_id for share in self.members}) < len(self.members):
            raise MalformedMessage("a member is named twice")

    @property
    def num_elements(self) -> int:
        return sum(share.num_elements for share in self.members)

    @property
    def round_samples(self) -> int:
        return sum(share.counts.round_samples for share in self.members)

    def total(self, norm: float) -> Counts:
        return Counts.total([share.counts for share in self.members], norm)

    @cached_property
    def parts(self) -> list[slice]:
        ends = list(itertools.accumulate((share.num_elements for share in self.members), initial=0))
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    @cached_property
    def part_of(self) -> dict[str, slice]:
        """The part that each member owns, in the same order."""
        return dict(zip((share.peer_id for share in self.members), self.parts, strict=True))

    @property
    def has_one_owner(self) -> bool:
        return sum(share.num_elements > 0 for share in self.members) == 1

    @property
    def senders(self) -> list[Share]:
        return [share for share in self.members if share.contributes]

    def of(self, peer_id: str) -> Share:
        """A member's share. Raises MalformedMessage for a peer that is no member."""
        for share in self.members:
            if share.peer_id == peer_id:
                return share
        raise MalformedMessage(f"{peer_id} is no member of this exchange")

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of all this, in hexadecimal."""
        lines = [f"{s.peer_id} {s.counts} {s.weight.hex()} {s.num_elements}" for s in self.members]
        if self.amended:
            lines.append(f"amended {self.amended}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def divide(
    begun: Mapping[str, pb.BeginReply], *, num_elements: int, tile: int, clip_to_median: float,
    owners: Collection[str] | None = None,
) -> Shares:  # fmt: skip
    """Weigh the members and cut the vector into their parts.

    Args:
        begun: each member's answer after it closed its contribution, in the members' order.
        num_elements: length of the vector.
        tile: the length of each part, except the last one, is a multiple of this.
        clip_to_median: a contribution counts for less if its norm is above this multiple of the median; 0 turns that
            off.
        owners: if given, only these own parts, so that no two others need a connection.
    """
    lines = {peer_id: reply.bytes_per_second for peer_id, reply in begun.items() if owners is None or peer_id in owners}
    size_of = dict(zip(lines, part_sizes(num_elements, list(lines.values()), tile=tile), strict=True))
    sizes = [size_of.get(peer_id, 0) for peer_id in begun]
    counts = [Counts.of(reply, reply.norm) for reply in begun.values()]
    return _weighed(list(begun), counts, sizes, clip_to_median)


def shares_of(
    shares: Sequence[pb.Share], config: RunConfig, block: Block, num_members: int = 1, amended: str = ""
) -> Shares:
    """The shares that a leader names. `config` is the one under that amendment. `num_members` says how many members'
    contributions may be in one share. Raises MalformedMessage if a member is named twice, or its counts are
    impossible."""
    counts = [Counts.of(share, share.norm) for share in shares]
    for share, each in zip(shares, counts, strict=True):
        if fault := each.fault(config, block, num_members):
            raise MalformedMessage(f"the contribution of {share.contact.peer_id} is {fault}")
    if not any(each.num_samples for each in counts):
        raise MalformedMessage("no member has samples")
    names, sizes = [share.contact.peer_id for share in shares], [share.num_elements for share in shares]
    return replace(_weighed(names, counts, sizes, clip_of(config)), amended=amended)


def prepared_of(
    request: pb.AverageRequest, shares: Shares, digest: str, squared_norm: float, given: Mapping[str, Given]
) -> pb.Prepared:
    """The result of an exchange: of these members, or of those that the leader names if it is among groups. `given` is
    what they have given by its end."""
    names = [share.peer_id for share in shares.members]
    return pb.Prepared(
        ballot=request.ballot, digest=digest, squared_norm=squared_norm, member_ids=request.member_ids or names,
        num_samples=shares.round_samples, decider_ids=names if request.member_ids and not request.is_part else [],
        amended=shares.amended, given=messages.pack_given(given, request.member_ids or names),
    )  # fmt: skip


def clip_of(config: RunConfig) -> float:
    """See `divide`. Synchronous contributions are not clipped: their sum must be the gradient that one process has."""
    return 0.0 if config.rounds.synchronous else config.averaging.clip_to_median


def _weighed(names: Sequence[str], counts: Sequence[Counts], sizes: Sequence[int], clip_to_median: float) -> Shares:
    weights = _weights(counts, clip_to_median)
    return Shares(
        tuple(
            Share(peer_id=name, counts=each, weight=weight, num_elements=size)
            for name, each, weight, size in zip(names, counts, weights, sizes, strict=True)
        )
    )


def _weights(begun: Collection[Counts], clip_to_median: float) -> list[float]:
    """The weight of each member: its share of all targets, so that the weighted sum of means is the mean over all
    targets. It is less where a norm is clipped."""
    assert any(reply.num_samples for reply in begun), "a round without samples is never averaged"
    # Without any target all gradients are 0. Steps may still have changed weights, for example by decay, and these
    # changes are averaged by samples.
    has_targets = any(reply.num_targets for reply in begun)
    amounts = [reply.num_targets if has_targets else reply.num_samples for reply in begun]
    median = statistics.median(reply.norm for reply in begun if reply.num_samples)
    limit = clip_to_median * median if clip_to_median and median else math.inf
    return [
        amount / sum(amounts) * min(1.0, limit / max(reply.norm, 1e-300))
        for reply, amount in zip(begun, amounts, strict=True)
    ]


def part_sizes(num_elements: int, bandwidths: Sequence[float], *, tile: int) -> list[int]:
    """Return the lengths of the parts, chosen so that all owners finish sending at the same time.

    With D elements and M owners, the owner of P elements sends D - P elements of its own, and its part's result M - 1
    times: D + (M - 2) P in all. The parts are chosen so that this number divided by the bandwidth is as nearly equal
    for all owners as their bounds allow. Between two no division helps.

    A bandwidth is a claim, and only the owner of a part sees what others give for it. So where members can be compared,
    none owns much more than an even part, and each owns something.
    """
    num_owners = len(bandwidths)
    low, high = PLAUSIBLE_BANDWIDTHS
    known = [bandwidth for bandwidth in bandwidths if low <= bandwidth <= high]
    shares = [1.0 / num_owners] * num_owners
    if num_owners > 2 and known and max(known) > BANDWIDTH_NOISE * min(known):
        median = statistics.median(known)
        told = [bandwidth if low <= bandwidth <= high else median for bandwidth in bandwidths]
        lines = [min(median * BANDWIDTH_RANGE, max(median / BANDWIDTH_RANGE, bandwidth)) for bandwidth in told]
        least, most = (LEAST_PART, LARGEST_PART) if num_owners >= LEAST_MEMBERS else (0.0, num_owners)
        shares = _fill(lines, least / num_owners, most / num_owners)
    ends = [round(end * num_elements / tile) * tile for end in itertools.accumulate(shares, initial=0.0)]
    ends = [min(end, num_elements) for end in ends[:-1]] + [num_elements]
    return [end - start for start, end in itertools.pairwise(ends)]


def _fill(lines: Sequence[float], least: float, most: float) -> list[float]:
    """Return shares p that add up to 1, with (1 + (M - 2) p) / line equal for all that are not bounded."""
    lines_M = np.array(lines)

    def shares_within(time: float) -> npt.NDArray[np.float64]:
        return ((time * lines_M - 1.0) / (len(lines) - 2)).clip(least, most)

    early, late = 0.0, (len(lines) - 1) / min(lines)  # Everybody could have sent everything by then.
    for _ in range(_HALVINGS):
        middle = (early + late) / 2
        early, late = (middle, late) if shares_within(middle).sum() < 1.0 else (early, middle)
    shares_M = shares_within(late)
    return [float(share) for share in shares_M / shares_M.sum()]
