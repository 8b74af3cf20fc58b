"""Many rounds of one block without a network: who is named among members that contribute as honest ones do, and as
liars do. Contributions are drawn, compared by the owners of parts, and judged."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from swarm.honesty.comparison import Comparison, Memory, growth_of
from swarm.honesty.suspects import ROUNDS, Suspects

LAYER, NUM_LAYERS = 4096, 3
SIZE = LAYER * NUM_LAYERS
LAYERS = [(f"layers.{number}", slice(number * LAYER, (number + 1) * LAYER)) for number in range(NUM_LAYERS)]
NOISE = np.repeat([0.5, 1.0, 3.0], LAYER) * np.random.default_rng(0).lognormal(0.0, 0.7, SIZE)
"""The noise of one microbatch's gradient, by layer. Some elements are much larger than others."""
Lie = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""Makes another contribution of the true one and that of the round before."""


@dataclass(eq=False)
class Member:
    """A member.

    Attributes:
        num_microbatches: what it computes in a round.
        rate: of its line.
        text: by how much its gradients differ from others' in every round.
    """

    name: str
    num_microbatches: int
    rate: float
    text: np.ndarray
    lie: Lie | None = None
    before: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    memory: Memory = field(default_factory=lambda: Memory(np.random.default_rng(0)))


class Rounds:
    """Rounds of a block, as a member sees them that is there all the time."""

    def __init__(self, seed: int, *, num_members: int, is_diloco: bool, is_even: bool = False) -> None:
        self.numbers, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.is_diloco, self.is_even = is_diloco, is_even
        self.suspects = Suspects()
        self.members = [self.newcomer() for _ in range(num_members)]
        self.named: dict[str, int] = {}
        self.left_out: list[tuple[int, str]] = []
        self.round = 0

    def newcomer(self) -> Member:
        return Member(
            name=f"{self.numbers.random():.12f}",
            num_microbatches=6 if self.is_even else self.numbers.choice([1, 4, 6, 6, 8]),
            rate=1.0 if self.is_even else self.numbers.choice([1.0, 1.0, 2.0]),
            text=0.3 * self.rng.standard_normal(SIZE),
        )

    def run(
        self, signal: float, scale: float, present: Sequence[Member] | None = None, late: Iterable[str] = ()
    ) -> None:
        """One round. `signal` says how much honest members agree, `scale` how large gradients are, and `late` who
        contributes the work of three rounds."""
        shared, parts, amounts = self.rng.standard_normal(SIZE), {}, {}
        for member in present or self.members:
            amount = member.num_microbatches * (3 if member.name in late else 1)
            true = signal * (shared + member.text) + NOISE * self.rng.standard_normal(SIZE) / amount**0.5
            true *= scale * (amount if self.is_diloco else 1)
            told = member.lie(true, member.before, self.rng) if member.lie else true
            member.before = true
            # Each member's processor rounds differently.
            told = told * (1.0 + 1e-7 * member.num_microbatches)
            parts[member.name], amounts[member.name] = torch.from_numpy(told.astype(np.float32)), 256 * amount
        self._exchange([*(present or self.members)], parts, amounts)
        for line in self.suspects.lines:
            name, is_naming, _ = line.partition(" lies: ")
            if is_naming:
                self.named.setdefault(name, self.round)
        self.round += 1

    def _exchange(self, members: list[Member], vectors: dict[str, torch.Tensor], amounts: dict[str, int]) -> None:
        while True:
            by_name = {member.name: member for member in members}
            order = self.suspects.in_order(by_name, self.round)
            rates = np.array([by_name[name].rate for name in order])
            edges = [0, *(int(edge) for edge in np.cumsum(rates) / rates.sum() * SIZE)]
            places = {name: slice(*edges[place : place + 2]) for place, name in enumerate(order)}
            said = {}
            for name, place in places.items():
                by_name[name].memory.begin(SIZE)
                comparison = Comparison(
                    amounts={each: amounts[each] for each in order}, part=place, layers=LAYERS,
                    memory=by_name[name].memory, growth=growth_of(is_synchronous=not self.is_diloco),
                )  # fmt: skip
                said[name] = comparison.deviations({each: vectors[each][place] for each in order})
            out = {found.peer_id for found in self.suspects.judge(self.round, said, places)}
            self.left_out += [(self.round, name) for name in out]
            if not out:
                break
            members = [member for member in members if member.name not in out]
        for member in members:
            member.memory.committed()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize("is_diloco", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_three_hundred_honest_rounds_with_churn_nobody_is_named(seed: int, is_diloco: bool) -> None:
    rounds = Rounds(seed, num_members=8, is_diloco=is_diloco)
    for number in range(300):
        if number % 3 == 2:  # Somebody leaves, or comes, or is replaced.
            if len(rounds.members) > 5 and rounds.numbers.random() < 0.7:
                rounds.members.remove(rounds.numbers.choice(rounds.members))
            if len(rounds.members) < 9 and rounds.numbers.random() < 0.8:
                rounds.members.append(rounds.newcomer())
        late = {rounds.numbers.choice(rounds.members).name} if is_diloco and number % 10 == 9 else ()
        # Gradients are huge and alike at first, and tiny and different at the end; then the learning rate is amended.
        signal, scale = 2.0 * 0.99**number, 1e3 * 0.95**number * (3.0 if number >= 150 else 1.0)
        rounds.run(signal, scale, late=late)
    assert rounds.named == {}


@pytest.mark.parametrize("size", [3, 4])
def test_nobody_is_named_in_groups_that_are_drawn_anew_each_round(size: int) -> None:
    rounds = Rounds(1, num_members=9, is_diloco=True)
    own = rounds.members[0]
    for number in range(150):
        others = rounds.numbers.sample(rounds.members[1:], size - 1)
        rounds.run(2.0 * 0.99**number, 0.97**number, present=[own, *others])
    assert rounds.named == {}


def _random(true: np.ndarray, _: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.standard_normal(SIZE)
    return drawn * float(np.linalg.norm(true) / np.linalg.norm(drawn))


def _in_one_layer(true: np.ndarray, _: np.ndarray, __: np.random.Generator) -> np.ndarray:
    return np.where(np.arange(SIZE) // LAYER == 1, -true, true)


LIES: dict[str, Lie] = {
    "zeros": lambda true, _, __: np.zeros_like(true),
    "sign": lambda true, _, __: -true,
    "scaled by 3": lambda true, _, __: 3.0 * true,
    "random": _random,
    "the round before's": lambda _, before, __: before,
    "one layer": _in_one_layer,
    # Gradients of text without order: large, and of another direction.
    "labels": lambda true, _, rng: 0.1 * true + 1.5 * _random(true, true, rng),
}  # fmt: skip
SMALL_LIES: dict[str, Lie] = {
    "one microbatch in ten": lambda true, _, rng: 0.9 * true + 0.1 * _random(true, true, rng),
    "now and then": lambda true, _, rng: -true if rng.random() < 0.3 else true,
    "half of it": lambda true, _, rng: 0.5 * true + _random(true, true, rng),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("lie", "is_even"), [*((lie, True) for lie in LIES), ("scaled by 3", False)])
def test_two_liars_of_eight_are_named_within_five_rounds_and_nobody_else_is(lie: str, is_even: bool, seed: int) -> None:
    rounds = Rounds(seed, num_members=8, is_diloco=True, is_even=is_even)
    for _ in range(8):
        rounds.run(1.0, 1.0)
    liars = rounds.members[2], rounds.members[5]
    for liar in liars:
        liar.lie = LIES[lie]
    for _ in range(12):
        rounds.run(1.0, 1.0)
    assert rounds.named.keys() == {liar.name for liar in liars}
    assert max(rounds.named.values()) < 8 + ROUNDS


def test_those_that_give_the_round_before_s_are_named_at_once_though_another_was_odd_in_that_round() -> None:
    rounds = Rounds(3, num_members=8, is_diloco=True, is_even=True)
    odd, *liars = rounds.members[:3]
    for number in range(10):
        odd.lie = LIES["one layer"] if number == 8 else None
        for liar in liars:
            liar.lie = LIES["the round before's"] if number == 9 else None
        rounds.run(1.0, 1.0)
    assert rounds.named == {liar.name: 9 for liar in liars}


def test_a_contribution_against_all_others_is_left_out_of_its_first_round() -> None:
    rounds = Rounds(0, num_members=8, is_diloco=True, is_even=True)
    liar = rounds.members[2]
    for number in range(9):
        if number == 8:
            liar.lie = LIES["sign"]
        rounds.run(1.0, 1.0)
    assert rounds.left_out == [(8, liar.name)]
    assert rounds.named == {}


@pytest.mark.parametrize(
    "lie", ["now and then", *(pytest.param(lie, marks=pytest.mark.slow) for lie in list(SMALL_LIES)[::2])]
)
def test_small_lies_get_nobody_else_named(lie: str) -> None:
    rounds = Rounds(5, num_members=8, is_diloco=False)
    for liar in rounds.members[:2]:
        liar.lie = SMALL_LIES[lie]
    for number in range(60):
        rounds.run(1.5 * 0.99**number, 1.0)
    assert rounds.named.keys() <= {liar.name for liar in rounds.members[:2]}
