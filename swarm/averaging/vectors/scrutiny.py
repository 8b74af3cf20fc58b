"""What a member finds of the others in an exchange: contributions that are out of line, and sums without its own.

Where every member sums a part, it compares what the others give for that part, and its words travel with the sum. In a
gather each member compares all of it. What is made of these words is in honesty/suspects.py.

Shapes: D elements of the vector, P of a part.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares
from swarm.averaging.vectors.terms import Average, Compare
from swarm.compression import buffers
from swarm.compression.codec import Codec
from swarm.events import Events, OutOfLine
from swarm.honesty.comparison import LEAST_ELEMENTS, MEAN_GRADIENTS, Comparison, Deviation, Growth, Memory, layers_of
from swarm.honesty.suspects import Suspects
from swarm.training.round_member import Contribution
from swarm.training.samples import Amount
from swarm.training.sketches import NOTHING_STATED, Sketched, Stated

SUM_DEVIATIONS = 4.0
"""An owner's sum is in line if what a member's own contribution has in it is within so many standard deviations."""
_PIECES = 16
NEW_ROUNDS = 12
"""A member is a newcomer for so many rounds. In trials the contributions of peers whose AdamW had no past were unlike
the others' for up to nine."""


@dataclass(eq=False, kw_only=True)
class Newcomers:
    """Which members' inner optimizers may have no past, as one member knows: those that it has met, or that began anew,
    in one of the last rounds. The past of those that it has met in the run's first round is as long as any.

    Attributes:
        round_number: gives the number of the round.
        starts: gives a text for each peer that changes when the peer begins anew, as far as that is known.
    """

    round_number: Callable[[], int]
    starts: Callable[[], Mapping[str, str]]
    _met: dict[str, tuple[str, int, int]] = field(default_factory=dict, init=False)
    """The text of each member, the round in which it was met first, and the last one."""

    def among(self, members: Collection[str]) -> Collection[str]:
        """The newcomers among the members of the round's exchange."""
        number, starts = self.round_number(), self.starts()
        self._met = {peer: met for peer, met in self._met.items() if number - met[-1] < NEW_ROUNDS}
        for peer in members:
            start, (before, first, _) = starts.get(peer, ""), self._met.get(peer, ("", number, number))
            began_anew = start and before and start != before
            self._met[peer] = start or before, number if began_anew else first, number
        return [peer for peer in members if number - NEW_ROUNDS < self._met[peer][1] > 0]


class Scrutiny:
    """What a member remembers of the others from one exchange to the next.

    Attributes:
        suspects: what follows from it.
    """

    def __init__(
        self, own_id: str, *, growth: Growth = MEAN_GRADIENTS, disproved: Callable[[], Mapping[str, str]] = dict,
        newcomers: Newcomers | None = None,
    ) -> None:  # fmt: skip
        """`growth` is that of the contributions. `disproved`: see RoundMember. Without `newcomers` nobody is one."""
        self.suspects = Suspects()
        self._own_id = own_id
        self._disproved = disproved
        self._growth = growth
        self._newcomers = newcomers
        self._memories: dict[int, Memory] = {}
        """What this member remembers of others' contributions to each fragment."""
        self._odd_sums: Sequence[Deviation] = ()
        """What this member says of the sums that others made in the last committed exchange."""
        self._new_odd_sums: Sequence[Deviation] | None = None
        """The same of an exchange that is not committed yet; None if that has not come to its sums. Where somebody's
        lie ends an exchange, that lie has made its sums odd, and not their owners."""

    def comparing(self, own: Contribution, shares: Shares, codec: Codec, *, gathers: bool) -> Compare:
        """What finds the deviations among the contributions to an exchange, in which this member gives `own`. `codec`
        is that of the contributions, here and below."""
        memory = self._memories.setdefault(own.fragment, Memory(np.random.default_rng()))
        memory.begin(shares.num_elements)
        self._new_odd_sums = None
        part = slice(0, shares.num_elements) if gathers else shares.part_of[self._own_id]
        comparison = Comparison(
            amounts={share.peer_id: share.counts.num_targets or share.counts.num_samples for share in shares.senders},
            part=part,
            layers=layers_of(buffers.places(own.tensors, is_tiled=codec.tile == buffers.TILE)),
            memory=memory,
            growth=self._growth,
            newcomers=self._newcomers.among([share.peer_id for share in shares.senders]) if self._newcomers else (),
        )
        if gathers:  # Then each member compares all, and no words travel.
            return lambda parts, stated: comparison.deviations(parts)
        found = self._disproved().items()
        told = tuple(Deviation(peer_id=peer, reason=why, is_computed=True, is_clear=True) for peer, why in found)
        sketched, tolerance = _sketched(own, codec), codec.sketch_tolerance

        def faults(peer: str, part_P: torch.Tensor, stated: Stated) -> Iterator[Deviation]:
            if sketched is not None and peer != self._own_id:
                counts = shares.of(peer).counts
                amount = Amount(counts.num_samples, counts.num_targets)
                if why := sketched.fault(peer, part_P, part, stated, amount, tolerance):
                    yield Deviation(peer_id=peer, reason=why, is_computed=True, is_clear=True)
                elif why := sketched.contradiction(peer, part, stated):
                    yield Deviation(peer_id=peer, reason=why, is_computed=True)

        def compare(parts: Mapping[str, torch.Tensor], stated: Mapping[str, Stated]) -> Sequence[Deviation]:
            each = (faults(peer, part_P, stated.get(peer, NOTHING_STATED)) for peer, part_P in parts.items())
            return (*self._odd_sums, *comparison.deviations(parts), *told, *chain.from_iterable(each))

        return compare

    def stated(self, own: Contribution, shares: Shares, codec: Codec) -> Mapping[str, Stated]:
        """What this member states of its contribution, to the owner of each part."""
        sketched = _sketched(own, codec)
        if sketched is None or not sketched.own:
            return {}
        return {owner: sketched.stated(part) for owner, part in shares.part_of.items()}

    async def look_at_sums(self, own_D: torch.Tensor | None, average: Average, shares: Shares, codec: Codec) -> None:
        """Note which owners' sums seem to be without what this member gave. It says so in the next exchanges, once this
        one is committed. `own_D` is None where that was its group's average."""
        self._new_odd_sums = await asyncio.to_thread(self._found_odd, own_D, average, shares, codec)

    def _found_odd(
        self, own_D: torch.Tensor | None, average: Average, shares: Shares, codec: Codec
    ) -> Sequence[Deviation]:
        own = shares.of(self._own_id)
        before = [each for each in self._odd_sums if each.peer_id not in shares.part_of]
        if own_D is None or not codec.sketch_tolerance or not own.contributes:
            return before
        found = odd_sums(own_D, average.vector_D, shares.part_of, own.weight)
        return [*before, *(each for each in found if each.peer_id != self._own_id)]

    def require_in_line(
        self, round_number: int, shares: Shares, average: Average, events: Events, *, gathers: bool
    ) -> None:
        """Raise MemberFailed if owners find a member's contribution out of line again and again."""
        whole = slice(0, shares.num_elements)
        of_members = dict.fromkeys(shares.part_of, whole) if gathers else shares.part_of
        named_before = {peer for peer in of_members if self.suspects.is_named(peer)}
        found = self.suspects.judge(round_number, average.deviations, of_members)
        # A member that gives nothing does no harm, and without it parts would have to be exchanged again.
        leaving = [each for each in found if shares.of(each.peer_id).contributes]
        for each in found:
            is_named = self.suspects.is_named(each.peer_id)
            is_new = is_named and each.peer_id not in named_before
            if each in leaving or is_new:
                evidence = self.suspects.evidence(each.peer_id) if is_new else ()
                events.write(
                    OutOfLine(
                        round=round_number, peer=each.peer_id, reason=each.reason, is_named=is_named,
                        evidence=tuple(evidence),
                    )
                )  # fmt: skip
        if leaving:
            self._new_odd_sums = None
            reason = f"its contribution is out of line: {leaving[0].reason}"
            raise MemberFailed(leaving[0].peer_id, reason, noticed_by=self._own_id)

    def committed(self, fragment: int) -> None:
        if self._new_odd_sums is not None:
            self._odd_sums, self._new_odd_sums = self._new_odd_sums, None
        if fragment in self._memories:
            self._memories[fragment].committed()


def _sketched(own: Contribution, codec: Codec) -> Sketched | None:
    """What ties a contribution to answers; None if that is not known, or the codec drops too much."""
    return own.sketched if codec.sketch_tolerance else None


def odd_sums(
    own_D: torch.Tensor, sum_D: torch.Tensor, parts: Mapping[str, slice], weight: float
) -> list[Deviation]:  # fmt: skip
    """The owners whose sums over their parts seem to be without a member's contribution, as that member sees them.

    Its own share of a sum is in the product of the two. What the others gave adds to that, or is as noise, and how much
    follows from pieces of the part. Where others are so many that their noise hides the share, nothing is odd.
    """
    found = []
    for owner, part in parts.items():
        own_P = own_D[part]
        pieces = zip(own_P.chunk(_PIECES), sum_D[part].chunk(_PIECES), strict=True)
        products = [float(own_E @ sum_E) for own_E, sum_E in pieces]
        noise = len(products) ** 0.5 * float(np.std(products))
        least = weight * float(own_P @ own_P) / 2
        if len(own_P) >= LEAST_ELEMENTS and sum(products) + SUM_DEVIATIONS * noise < least:
            reason = "the sum that it made of its part is not that of the contributions"
            found.append(Deviation(peer_id=owner, reason=reason))
    return found
