"""Contributions are compared with each other: which ones are out of line, and in what."""

import numpy as np
import pytest
import torch

from swarm.compression import buffers
from swarm.honesty.comparison import LEAST_ELEMENTS, MEAN_GRADIENTS, STEPS, Comparison, Growth, Memory, layers_of

SIZE, LAYER = 8192, 2048
LAYERS = [(f"layers.{index}", slice(index * LAYER, (index + 1) * LAYER)) for index in range(SIZE // LAYER)]


def contributions(
    num_members: int, *, seed: int = 0, common: float = 0.5, size: int = SIZE, others: float = 1.0
) -> dict[str, torch.Tensor]:
    """Vectors that have `common` in common, and noise of their own of that size."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(size, generator=generator)
    return {
        str(number): common * shared + others * torch.randn(size, generator=generator) for number in range(num_members)
    }


def memory() -> Memory:
    made = Memory(np.random.default_rng(0))
    made.begin(SIZE)
    return made


def compared(
    parts: dict[str, torch.Tensor], *, amounts: dict[str, int] | None = None, part: slice = slice(0, SIZE),
    remembered: Memory | None = None, growth: Growth = MEAN_GRADIENTS, newcomers: str = "",
) -> dict[str, str]:  # fmt: skip
    comparison = comparison_of(
        parts, remembered or memory(), amounts=amounts, part=part, growth=growth, newcomers=newcomers
    )
    return {found.peer_id: found.reason for found in comparison.deviations(parts)}


def comparison_of(
    parts: dict[str, torch.Tensor], remembered: Memory, *, amounts: dict[str, int] | None = None,
    part: slice = slice(0, SIZE), growth: Growth = MEAN_GRADIENTS, newcomers: str = "",
) -> Comparison:  # fmt: skip
    return Comparison(
        amounts=amounts or dict.fromkeys(parts, 64), part=part, layers=LAYERS, memory=remembered, growth=growth,
        newcomers=newcomers,
    )  # fmt: skip


@pytest.mark.parametrize("common", [0.0, 0.1, 0.5, 3.0])
def test_nobody_is_out_of_line_among_the_honest(common: float) -> None:
    for seed in range(20):
        assert compared(contributions(8, seed=seed, common=common)) == {}, seed


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (0.0, "its norm is 0 times what is usual for its samples"),
        (3.0, "its norm is 3 times what is usual for its samples"),
        (0.2, "its norm is 0.2 times what is usual for its samples"),
        (-1.0, "its cosine with the mean of the others is -0."),
    ],
)
@pytest.mark.parametrize("num_members", [4, 8])
def test_a_multiple_is_found_in_the_whole_part(factor: float, reason: str, num_members: int) -> None:
    parts = contributions(num_members)
    parts["1"] *= factor
    found = compared(parts)
    assert found.keys() == {"1"}
    assert found["1"].startswith(reason)
    assert " in layers" not in found["1"]


def test_where_many_give_nothing_the_others_are_compared() -> None:
    parts = contributions(8)
    for peer in "456":
        parts[peer] *= 0.0
    parts["0"] *= 1e-6
    assert compared(parts) == {}


def test_two_of_eight_that_give_the_same_lie_are_both_found() -> None:
    parts = contributions(8)
    lie = torch.randn(SIZE, generator=torch.Generator().manual_seed(9))
    parts["2"] = parts["5"] = lie * parts["2"].norm() / lie.norm()
    assert compared(parts).keys() == {"2", "5"}


def test_a_lie_in_one_layer_is_found_by_the_owner_of_a_part_of_it() -> None:
    parts = contributions(8)
    parts["3"][LAYERS[2][1]] *= -1
    assert " in layers.2" in compared(parts)["3"]
    part = slice(LAYER // 2, 2 * LAYER + LEAST_ELEMENTS)
    assert " in layers.2" in compared({peer: each[part] for peer, each in parts.items()}, part=part)["3"]
    too_little = slice(LAYER // 2, 2 * LAYER + LEAST_ELEMENTS - 1)
    found = compared({peer: each[too_little] for peer, each in parts.items()}, part=too_little)
    assert found == {}


def test_who_has_more_or_fewer_samples_may_be_longer_or_less_sure_of_its_direction() -> None:
    parts = contributions(8, common=1.0)
    amounts = dict.fromkeys(parts, 64)
    amounts["1"], amounts["2"] = 192, 4
    parts["1"] *= 3.0
    parts["2"] = contributions(8, common=1.0, others=4.0)["2"]
    assert compared(parts, amounts=amounts) == {}
    assert compared(parts).keys() == {"1", "2"}


@pytest.mark.parametrize("power", [0.6, 0.9])
def test_paths_of_more_or_fewer_steps_are_longer_or_shorter_and_a_multiple_of_one_is_found(power: float) -> None:
    parts = contributions(8, common=1.0)
    steps = dict(zip(parts, [3, 4, 5, 6, 6, 8, 10, 12], strict=True))
    for peer, part_P in parts.items():
        part_P *= steps[peer] ** power
    assert compared(parts, amounts=steps, growth=STEPS) == {}
    for liar in parts:
        told = parts | {liar: 3.0 * parts[liar]}
        assert compared(told, amounts=steps, growth=STEPS).keys() == {liar}


def test_newcomers_may_take_longer_steps_in_a_layer_but_not_in_another_direction() -> None:
    parts, layer = contributions(8), LAYERS[2][1]
    for newcomer in "16":
        parts[newcomer][layer] *= 4.7
    assert compared(parts, growth=STEPS, newcomers="16") == {}
    assert compared(parts, growth=STEPS, newcomers="1").keys() == {"6"}
    parts["6"] *= -1
    assert compared(parts, growth=STEPS, newcomers="16").keys() == {"6"}
    parts["6"] *= -1
    parts["6"][layer] *= 2
    assert compared(parts, growth=STEPS, newcomers="16").keys() == {"6"}


def test_who_was_there_before_most_others_is_not_out_of_line() -> None:
    parts = contributions(8)
    for newcomer in "12345":
        parts[newcomer] *= 4.0
    assert compared(parts, growth=STEPS, newcomers="12345") == {}
    assert compared(parts, growth=STEPS, newcomers="12").keys() == {"0", "6", "7"}


def test_where_honest_members_hardly_agree_directions_say_nothing() -> None:
    parts = contributions(8, common=0.05)
    parts["1"] *= -1
    assert compared(parts) == {}


@pytest.mark.parametrize("num_members", [2, 3])
@pytest.mark.parametrize(
    ("factor", "reason"),
    [(0.0, "one is zero"), (3.0, "one has 3 times the norm of another"), (-1.0, "two have a cosine of -0.")],
)
def test_among_three_it_is_seen_that_they_differ_and_nobody_can_say_who_is_wrong(
    num_members: int, factor: float, reason: str
) -> None:
    parts = contributions(num_members)
    assert compared(parts) == {}
    parts["1"] *= factor
    assert {peer: said[: len(reason)] for peer, said in compared(parts).items()} == {"": reason}


def test_a_contribution_of_an_earlier_round_is_found() -> None:
    remembered = memory()
    before = contributions(8, seed=1)
    assert compared(before, remembered=remembered) == {}
    remembered.committed()
    parts = contributions(8, seed=2, common=0.1)
    parts["4"] = before["4"]
    assert compared(parts, remembered=remembered) == {"4": "it is the one that it gave before"}


@pytest.mark.parametrize(("change", "is_sure"), [(0.0, True), (0.1, False)])
def test_only_the_very_same_contribution_is_a_proof(*, change: float, is_sure: bool) -> None:
    remembered, before = memory(), contributions(8, seed=1, common=3.0)
    compared(before, remembered=remembered)
    remembered.committed()
    # With DiLoCo contributions of honest members may be much like their last ones.
    parts = contributions(8, seed=2, common=3.0)
    parts["4"] = before["4"] + change * parts["4"]
    comparison = comparison_of(parts, remembered)
    found = [(each.is_computed, each.is_clear) for each in comparison.deviations(parts) if each.peer_id == "4"]
    assert found == [(True, True)] * is_sure + [(False, False)]
    alike = {peer: 1.0001 * each for peer, each in before.items()}
    assert comparison.deviations(alike) == ()


@pytest.mark.parametrize(("factor", "is_clear"), [(-1.0, True), (20.0, True), (0.0, False), (3.0, False)])
def test_what_no_honest_member_gives_is_clear(factor: float, is_clear: bool) -> None:
    parts = contributions(8, common=1.0)
    parts["1"] *= factor
    comparison = comparison_of(parts, memory())
    assert [(each.peer_id, each.is_clear) for each in comparison.deviations(parts)] == [("1", is_clear)]


def test_odd_numbers_and_those_of_one_layer_are_not_clear() -> None:
    parts = contributions(8, common=1.0)
    parts["1"] = contributions(1, seed=1)["0"]
    parts["2"][LAYERS[2][1]] *= -1
    comparison = comparison_of(parts, memory())
    assert {each.peer_id: each.is_clear for each in comparison.deviations(parts)} == {"1": False, "2": False}


def test_a_contribution_that_was_not_committed_may_be_given_again() -> None:
    remembered = memory()
    parts = contributions(8)
    assert compared(parts, remembered=remembered) == {}
    remembered.begin(SIZE)
    assert compared(parts, remembered=remembered) == {}
    remembered.committed()
    # Where all members do what they did before, nobody is out of line.
    assert compared(parts, remembered=remembered) == {}


@pytest.mark.parametrize("is_tiled", [False, True])
def test_layers_are_where_the_vector_has_them(is_tiled: bool) -> None:
    shapes = {"embedding.weight": (128, 70), "layers.0.a.weight": (64, 64), "layers.0.b": (5,), "layers.10.a": (65, 64)}
    tensors = {name: torch.full(shape, float(index)) for index, (name, shape) in enumerate(shapes.items())}
    size = sum(tensor.numel() for tensor in tensors.values())
    write = buffers.flatten if is_tiled else buffers.concatenate
    vector = write(tensors, torch.empty(size))
    places = list(buffers.places(tensors, is_tiled=is_tiled))
    assert [place.start for _, place in places] == [0, *(place.stop for _, place in places[:-1])]
    assert places[-1][1].stop == size
    for name, place in places:
        if name:
            assert set(vector[place].tolist()) <= {float(list(shapes).index(name))}
    layers = dict(layers_of(places))
    assert layers.keys() == {"embedding", "layers.0", "layers.10"} | ({""} if is_tiled else set())
    assert layers["layers.0"].stop - layers["layers.0"].start == (4096 if is_tiled else 4101)
