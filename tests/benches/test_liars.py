"""The liars bench: how its lies are told, and what its figures mean."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from scripts.benches.liars import Options, summary
from scripts.benches.sides.liars_arm import CHURN, CONTRIBUTIONS, HONEST, MIXED, WAYS, LyingMember
from scripts.benches.sides.worker import Worker
from swarm.training.round_member import Contribution


class Member:
    """A stage whose contribution is the number of its round."""

    async def close(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        tensors = {f"layers.{layer}.weight": torch.full((8,), round_number + 1.0) for layer in range(2)}
        return Contribution(tensors=tensors, num_samples=1, num_targets=1, round_samples=1)


@pytest.mark.parametrize(
    ("way", "expected"),
    [("zeros", (0.0, 0.0)), ("sign", (-3.0, -3.0)), ("scaled", (9.0, 9.0)), ("yesterday", (2.0, 2.0)),
     ("one-layer", (3.0, -3.0))],
)  # fmt: skip
async def test_a_lie_begins_at_its_round_and_changes_the_contribution_alone(
    way: str, expected: tuple[float, float]
) -> None:
    worker = SimpleNamespace(member=Member())
    LyingMember(cast("Worker", worker), CONTRIBUTIONS[way], first_round=2)
    told = [await worker.member.close(number, drop=()) for number in range(3)]
    assert [float(each.tensors["layers.0.weight"][0]) for each in told[:2]] == [1.0, 2.0]
    assert tuple(float(told[2].tensors[f"layers.{layer}.weight"][0]) for layer in range(2)) == expected
    assert told[2].num_samples == 1


async def test_random_numbers_have_the_true_norm() -> None:
    true = (await Member().close(4, drop=())).tensors
    told = CONTRIBUTIONS["random"](true, None, 4)
    for name, value in true.items():
        assert float(told[name].norm()) == pytest.approx(float(value.norm()), rel=1e-5)


def _figures(**changes: Any) -> dict[str, Any]:
    figures = {"caught": 1.0, "falsely_named": 0, "found_by": {}, "held_out_loss": 2.0, "left_out": 0, "rounds": 9,
               "overhead": 0.01, "rounding": 1e-7}  # fmt: skip
    return figures | changes


def test_what_is_caught_is_a_mean_over_ways_and_what_is_named_falsely_a_sum() -> None:
    found = {(way, "diloco"): _figures() for way in (CHURN, MIXED, HONEST, "zeros", "sign")}
    assert all(summary("diloco", found, ("zeros", "sign"))["reached"].values())
    found["sign", "diloco"] = _figures(caught=0.5, falsely_named=1, held_out_loss=2.1)
    figures = summary("diloco", found, ("zeros", "sign"))
    assert figures["caught"] == pytest.approx(0.75)
    assert figures["falsely_named"] == 1
    assert figures["ways"]["sign"]["loss_ratio"] == pytest.approx(1.05)
    assert figures["reached"] == {"caught": False, "falsely_named": False, "overhead": True, "loss": False}


def test_an_unknown_way_to_lie_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--ways: 'activations' is none of"):
        Options(ways=("activations",))
    assert Options().ways == WAYS
