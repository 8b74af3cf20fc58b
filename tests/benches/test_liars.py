"""The liars bench: how its lies are told, what its swarm finds, and what its figures mean."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from scripts.benches.liars import summary
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.liars_arm import CHURN, HONEST, MIXED, Arm, run_config, train
from scripts.benches.sides.lies import CONTRIBUTIONS, LyingMember
from swarm.stage.member import StageMember
from swarm.training.round_member import Contribution


class Member:
    """A stage whose contribution is the number of its round."""

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        tensors = {f"layers.{layer}.weight": torch.full((8,), round_number + 1.0) for layer in (1, 2)}
        return Contribution(tensors=tensors, num_samples=1, num_targets=1, round_samples=1)


@pytest.mark.parametrize(
    ("way", "expected"),
    [("zeros", (0.0, 0.0)), ("sign", (-3.0, -3.0)), ("scaled", (9.0, 9.0)), ("yesterday", (2.0, 2.0)),
     ("one-layer", (3.0, -3.0))],
)  # fmt: skip
async def test_a_lie_begins_at_its_round_and_changes_the_contribution_alone(
    way: str, expected: tuple[float, float]
) -> None:
    member = cast("StageMember", Member())
    LyingMember(member, CONTRIBUTIONS[way], first_round=2)
    told = [await member.freeze(number, drop=()) for number in range(3)]
    assert [float(each.tensors["layers.1.weight"][0]) for each in told[:2]] == [1.0, 2.0]
    assert tuple(float(told[2].tensors[f"layers.{layer}.weight"][0]) for layer in (1, 2)) == expected
    assert told[2].num_samples == 1


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind", "num_rounds"), [("labels", "computed", 10), ("zeros", "computed", 3)])
async def test_a_liar_among_stage_peers_is_found_in_what_it_computes_and_in_what_it_contributes(
    way: str, kind: str, num_rounds: int, text: str, tmp_path: Path
) -> None:
    config, data = with_corpus(run_config("synchronous", text, "fp32", 0, check_share=1.0, each=2), tmp_path)
    arm = Arm(way=way, num_peers=4, liars=(1,), honest_rounds=1)
    found = await train(arm, config, data, num_rounds, tmp_path / "events")
    assert (found["named"], found["falsely_named"], found["falsely_left_alone"]) == (1, 0, 0), found["false_lines"]
    assert found["found_by"].get(kind), found
    assert found["overhead"] > 0.0


def _figures(**changes: Any) -> dict[str, Any]:
    figures = {"caught": 1.0, "named": 2, "falsely_named": 0, "found_by": {}, "held_out_loss": 2.0, "left_out": 0,
               "left_alone": 2, "falsely_left_alone": 0, "rounds": 9, "overhead": 0.01, "rounding": 1e-7}  # fmt: skip
    return figures | changes


def test_what_is_caught_is_a_mean_over_ways_and_what_is_named_falsely_a_sum() -> None:
    found = {("diloco", way, "all"): _figures() for way in (CHURN, MIXED, HONEST, "zeros", "sign")}
    assert all(summary("diloco", found)["reached"].values())
    found["diloco", "sign", "all"] = _figures(caught=0.5, falsely_named=1, held_out_loss=2.1)
    found["synchronous", "sign", "all"] = _figures(caught=0.0)
    figures = summary("diloco", found)
    assert figures["caught"] == pytest.approx(0.75)
    assert figures["falsely_named"] == 1
    assert figures["ways"]["sign"]["loss_ratio"] == pytest.approx(1.05)
    assert figures["alone"] == {}
    assert figures["reached"] == {"caught": False, "falsely_named": False, "overhead": True, "loss": False}
