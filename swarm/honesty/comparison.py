"""Compares the members' contributions to one part of the vector: which of them are out of line, and in what.

The owner of a part compares what it is about to sum. In the whole part, and in each layer in it, a contribution's norm
is held against the median of all, and its direction against the mean direction of a majority that agrees best. A
contribution that the same member has given before is found too. What is usual is measured anew each time by medians and
by the median distance from them, which a minority of liars cannot move far. Never decides anything about a member: see
suspects.

Shapes: M members, P elements of the part, C elements at a time.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

LEAST_MEMBERS = 4
"""Among fewer members nobody can say who of them is out of line."""
LEAST_ELEMENTS = 512
"""A part, or the part of a layer, with fewer elements is too small: directions differ by chance."""
DEVIATIONS = 6.0
"""A contribution is in line if it is within so many standard deviations of the others, as estimated from the median
distance."""
NORM_FACTOR = 2.5
"""The norm of a mean gradient is in line between the median divided by this and the median times this, whatever the
deviation."""
COSINE_SHARE = 0.25
"""A direction is in line with at least this share of the usual cosine, whatever the deviation."""
LEAST_COSINE = 0.15
"""Directions are compared only if the usual cosine is as large as this: below it honest members hardly agree."""
MOST_DEVIATION = 0.15
"""Cosines are not taken to differ by more, so that among members that differ much somebody opposite is found."""
CLEAR_FACTOR, CLEAR_SHARE = 10.0, -0.5
"""No honest contribution is so far out of line: so many times as long as usual, beyond the leeway that it has because
of its amount and because others differ, or with less than this share of the usual cosine."""
REPEATED_COSINE, NEW_COSINE = 0.98, 0.9
"""A contribution repeats an earlier one if its cosine with that is above the first value, and that of most other
members with their earlier ones is below the second one."""
SAME_CHANGE, NEW_CHANGE = 1e-3, 0.05
"""It is the very same if it differs by less than the first share of the norm, and most members' differ from their
earlier ones by more than the second."""
NUM_REMEMBERED = 1 << 14
"""The elements of each member's last contribution that are remembered."""
LEAST_REMEMBERED = 64
"""Fewer of them in the part are too few."""
MOST_REMEMBERED = 256
"""The members of which something is remembered: those that contributed last."""
_CHUNK = 1 << 16
_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution, as a multiple of the median distance from its median."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One owner's word that a member's contribution is out of line.

    Attributes:
        peer_id: empty if the contributions of too few members differ much, and nobody can say whose is wrong.
        reason: in words that follow "its contribution is out of line: ".
        is_computed: whether the owner found by computing that the member's answer to a microbatch is wrong, or its
            contribution not the sum of its answers' gradients; or the same that it has given before.
        is_clear: whether honest contributions are never so far out of line; of what was computed, whether an honest
            member never looks so.
    """

    peer_id: str
    reason: str
    is_computed: bool = False
    is_clear: bool = False


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the norms of honest contributions depend on the amounts that they are made of.

    Attributes:
        power: one of s times the usual amount is about s to this power as long.
        leeway: by which this power may be larger or smaller.
        factor: a norm is in line up to what is usual for its amount times this, whatever the deviation.
        newcomer_factor: the same for a newcomer.
        divisor: a norm is in line down to what is usual divided by this, and by `newcomer_factor` if at least half of
            the members are newcomers.
    """

    power: float
    leeway: float
    factor: float
    newcomer_factor: float
    divisor: float


MEAN_GRADIENTS = Growth(power=0.0, leeway=1.0, factor=NORM_FACTOR, newcomer_factor=NORM_FACTOR, divisor=NORM_FACTOR)
"""A mean over few samples is longer where they are noise, and longer or shorter where their text is odd."""
STEPS = Growth(power=0.75, leeway=0.25, factor=2.2, newcomer_factor=6.0, divisor=3.0)
"""The path of s times as many steps is s times as long if it is straight, and the root of s times if each step goes
another way. In trials of a small model with 1 to 12 steps the power was 0.56 to 0.95, and norms differed from what it
says by 10 % to 20 %. A newcomer's AdamW does not remember how large gradients once were, so that it takes longer steps
where they are small now, as in the output's weights of tokens that are rare. With 4 to 20 steps a round this layer was
up to 4.7 times as long as usual, and more than 2.2 times for up to nine rounds; after twelve, 1.3 times. That of the
members that were there before most others was 0.41 times as long as usual."""


def growth_of(*, is_synchronous: bool) -> Growth:
    """How the norms of the contributions to synchronous rounds, or to DiLoCo's, grow."""
    return MEAN_GRADIENTS if is_synchronous else STEPS


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of the contributions to one part.

    Attributes:
        amounts: the targets, or samples, that each member's contribution was made of, by the members' ids.
        part: the place of the part in the vector.
        layers: the places of the layers in the vector, by name, one after the other.
        memory: what this member remembers of earlier contributions.
        growth: how norms grow with amounts.
        newcomers: the members whose optimizer may have no past.
    """

    amounts: Mapping[str, int]
    part: slice
    layers: Sequence[tuple[str, slice]]
    memory: "Memory"
    growth: "Growth"
    newcomers: Collection[str] = ()

    def deviations(self, parts: Mapping[str, torch.Tensor]) -> tuple[Deviation, ...]:
        """The members whose contributions, each of shape (P,), are out of line. One that is so in several ways or
        places is named once, and once more if it gave the very same before."""
        peers = [peer for peer in self.amounts if peer in parts]
        if len(peers) < LEAST_MEMBERS:
            return self._undecided(list(parts.values()))
        length = self.part.stop - self.part.start
        if length < LEAST_ELEMENTS:
            return ()
        amounts = np.array([max(1, self.amounts[peer]) for peer in peers], dtype=float)
        is_new = [peer in self.newcomers for peer in peers]
        factors = np.where(is_new, self.growth.newcomer_factor, self.growth.factor)
        products = [(name, rows, _products([parts[peer][rows] for peer in peers])) for name, rows in self._places()]
        whole = sum(each for _, _, each in products)
        found = dict[str, Deviation]()
        for name, size, each in [
            ("", length, whole), *((name, rows.stop - rows.start, each) for name, rows, each in products)
        ]:  # fmt: skip
            if size >= LEAST_ELEMENTS:
                where = f" in {name}" if name else ""
                for index, reason, is_clear in _out_of_line(np.asarray(each), amounts, factors, size, self.growth):
                    deviation = Deviation(peer_id=peers[index], reason=reason + where, is_clear=is_clear and not name)
                    found.setdefault(peers[index], deviation)
        again = "it is the one that it gave before"
        repeated = self.memory.repeated({peer: parts[peer] for peer in peers}, self.part)
        for peer in repeated:
            found.setdefault(peer, Deviation(peer_id=peer, reason=again))
        # To send one vector twice is no matter of chance.
        proofs = [
            Deviation(peer_id=peer, reason=again, is_computed=True, is_clear=True)
            for peer, is_same in sorted(repeated.items()) if is_same
        ]  # fmt: skip
        return (*proofs, *(each for _, each in sorted(found.items())))

    def _undecided(self, parts: Sequence[torch.Tensor]) -> tuple[Deviation, ...]:
        if len(parts) < 2 or self.part.stop - self.part.start < LEAST_ELEMENTS:
            return ()
        products_MM, amounts = _products(parts), [max(1, amount) for amount in self.amounts.values()]
        norms_M = np.sqrt(products_MM.diagonal())
        longest, shortest = float(norms_M.max()), float(norms_M.min())
        factor = self.growth.newcomer_factor if self.newcomers else NORM_FACTOR
        if longest > shortest * factor * max(amounts) / min(amounts):
            reason = f"one has {longest / shortest:.2g} times the norm of another" if shortest else "one is zero"
        elif (least := float((products_MM / np.outer(norms_M, norms_M).clip(1e-30)).min())) < -LEAST_COSINE:
            reason = f"two have a cosine of {least:.2f}"
        else:
            return ()
        return (Deviation(peer_id="", reason=reason),)

    def _places(self) -> Iterable[tuple[str, slice]]:
        """The layers in the part, as places in it."""
        for name, place in self.layers:
            start, stop = max(place.start, self.part.start), min(place.stop, self.part.stop)
            if start < stop:
                yield name, slice(start - self.part.start, stop - self.part.start)


def layers_of(places: Iterable[tuple[str, slice]]) -> list[tuple[str, slice]]:
    """Join the places of parameters that follow each other and belong to one layer."""
    joined: list[tuple[str, slice]] = []
    for name, place in places:
        layer = _layer_of(name)
        if joined and joined[-1][0] == layer:
            joined[-1] = (layer, slice(joined[-1][1].start, place.stop))
        else:
            joined.append((layer, place))
    return joined


def _layer_of(name: str) -> str:
    """The name up to its first number, or up to its first dot."""
    numbered = re.match(r".*?\.\d+(?=\.|$)", name)
    return numbered.group() if numbered else name.partition(".")[0]


def _products(parts: Sequence[torch.Tensor]) -> np.ndarray:
    """The scalar products of all pairs, of shape (M, M)."""
    total = np.zeros((len(parts), len(parts)))
    for start in range(0, parts[0].numel(), _CHUNK):
        pieces_MC = torch.stack([part_P[start : start + _CHUNK] for part_P in parts])
        total += (pieces_MC @ pieces_MC.T).numpy()
    return total


def _out_of_line(
    products_MM: np.ndarray, amounts_M: np.ndarray, factors_M: np.ndarray, num_elements: int, growth: Growth
) -> Iterable[tuple[int, str, bool]]:  # fmt: skip
    """The members that are out of line, in what, and whether clearly. `factors_M` tells up to how many times the usual
    length each is in line, whatever the deviation."""
    norms_M = np.sqrt(products_MM.diagonal())
    shares_M = amounts_M / np.median(amounts_M)
    scaled_M = norms_M / shares_M**growth.power
    usual = float(np.median(scaled_M))
    if not usual > 0.0:
        return
    leeway_M = np.maximum(shares_M, 1.0 / shares_M) ** growth.leeway
    logs_M = np.log(np.maximum(scaled_M / usual, 1e-9))
    usual_factor = float(np.exp(DEVIATIONS * spread(logs_M)))
    longest_M = np.log(leeway_M * np.maximum(factors_M, usual_factor))
    half_are_new = 2 * np.count_nonzero(factors_M > growth.factor) >= len(factors_M)
    divisor = growth.newcomer_factor if half_are_new else growth.divisor
    shortest_M = -np.log(leeway_M * max(divisor, usual_factor))
    is_out_M = (logs_M > longest_M) | (logs_M < shortest_M)
    clear_M = np.log(CLEAR_FACTOR * leeway_M * max(1.0, usual_factor / growth.factor))
    for index in np.flatnonzero(is_out_M):
        reason = f"its norm is {scaled_M[index] / usual:.2g} times what is usual for its samples"
        yield int(index), reason, bool(logs_M[index] > clear_M[index])
    usable = np.flatnonzero(~is_out_M & (norms_M > 0.0))
    if len(usable) < LEAST_MEMBERS:
        return
    cosines = _cosines(
        products_MM[np.ix_(usable, usable)] / np.outer(norms_M[usable], norms_M[usable]), shares_M[usable]
    )
    typical = float(np.median(cosines))
    if typical < LEAST_COSINE:
        return
    # Among few members the median distance is small by chance now and then. A cosine of so many elements differs from
    # itself by at least this much where the elements' noise is independent.
    deviation = min(max(spread(cosines), num_elements**-0.5), MOST_DEVIATION)
    for index, cosine in zip(usable, cosines, strict=True):
        # The direction of a mean over fewer samples is less certain.
        expected = typical * min(1.0, float(shares_M[index])) ** 0.5
        if cosine < min(expected - DEVIATIONS * deviation, COSINE_SHARE * expected):
            reason = f"its cosine with the mean of the others is {cosine:.2f}, where {typical:.2f} is usual"
            yield int(index), reason, bool(cosine < CLEAR_SHARE * expected)


def _cosines(products_MM: np.ndarray, shares_M: np.ndarray) -> np.ndarray:
    """The cosine of each member's direction with the mean direction of those that agree best, without its own.

    These are a majority, chosen by the median of their cosines with all others: so no minority gets a high place by
    agreeing among itself. Takes the products of vectors of norm 1.
    """
    num_members = len(shares_M)
    scores_M = [float(np.median(np.delete(products_MM[index], index))) for index in range(num_members)]
    best = np.argsort(scores_M)[::-1][: num_members // 2 + 1]
    weights_M = np.zeros(num_members)
    weights_M[best] = np.minimum(1.0, shares_M[best])
    sums_M = products_MM @ weights_M
    own_M = weights_M * products_MM.diagonal()
    squares_M = weights_M @ sums_M - 2 * weights_M * sums_M + weights_M * own_M
    return np.asarray((sums_M - own_M) / np.sqrt(np.maximum(squares_M, 1e-30)))


def spread(values: np.ndarray) -> float:
    """The standard deviation of the values, as estimated from their median distance from the median."""
    return _TO_DEVIATION * float(np.median(np.abs(values - np.median(values))))


@dataclass(eq=False)
class Memory:
    """What one member remembers of the contributions in committed rounds: a few elements of each, at places that only
    it knows."""

    generator: np.random.Generator
    _places: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), init=False)
    _length: int = field(default=0, init=False)
    _kept: dict[str, tuple[slice, np.ndarray]] = field(default_factory=dict, init=False)
    """By member: the places that were seen, as a slice of `_places`, and the elements there."""
    _new: dict[str, tuple[slice, np.ndarray]] = field(default_factory=dict, init=False)
    """The same of an exchange that is not committed yet."""

    def begin(self, length: int) -> None:
        """Begin with an exchange of vectors of this length. Another length than before makes all forgotten."""
        self._new = {}
        if length != self._length:
            self._length, self._kept = length, {}
            self._places = np.unique(self.generator.integers(0, length, NUM_REMEMBERED))

    def repeated(self, parts: Mapping[str, torch.Tensor], part: slice) -> dict[str, bool]:
        """The members that give again what they gave in an earlier round, and whether it is the very same."""
        start, stop = (int(edge) for edge in np.searchsorted(self._places, [part.start, part.stop]))
        at = torch.from_numpy(self._places[start:stop] - part.start)
        cosines, changes = dict[str, float](), dict[str, float]()
        for peer, part_P in parts.items():
            elements = part_P[at].numpy()
            self._new[peer] = slice(start, stop), elements
            if (kept := self._kept.get(peer)) is not None:
                first, last = max(start, kept[0].start), min(stop, kept[0].stop)
                if last - first >= LEAST_REMEMBERED:
                    now, before = (
                        elements[first - start : last - start],
                        kept[1][first - kept[0].start :][: last - first],
                    )
                    length = float(np.linalg.norm(now)) * float(np.linalg.norm(before))
                    cosines[peer] = float(now @ before) / max(length, 1e-30)
                    changes[peer] = float(np.linalg.norm(now - before)) / max(float(np.linalg.norm(before)), 1e-30)
        if len(cosines) < LEAST_MEMBERS:
            return {}
        others_differ = np.median(list(changes.values())) > NEW_CHANGE
        found = {peer: True for peer, change in changes.items() if change < SAME_CHANGE and others_differ}
        if np.median(list(cosines.values())) <= NEW_COSINE:
            found = {peer: False for peer, cosine in cosines.items() if cosine > REPEATED_COSINE} | found
        return found

    def committed(self) -> None:
        """Keep what the exchange gave. One that is not committed may be given again."""
        for peer, elements in self._new.items():
            self._kept.pop(peer, None)
            self._kept[peer] = elements
        while len(self._kept) > MOST_REMEMBERED:
            del self._kept[next(iter(self._kept))]
        self._new = {}
