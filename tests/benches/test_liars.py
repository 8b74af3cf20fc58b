"""The liars bench: how its lies are told, what its swarm finds, and what its figures mean."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from scripts.benches.liars import Options, summary
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.liars_arm import CHURN, HONEST, MIXED, Arm, run_config, train
from scripts.benches.sides.lies import CONTRIBUTIONS, WAYS, LyingBackend, LyingMember
from swarm.stage.backend import StageBackend
from swarm.stage.member import StageMember
from swarm.stage.staging import Download
from swarm.training.round_member import Contribution
from swarm.training.samples import TOKENS


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


async def test_random_numbers_have_the_true_norm() -> None:
    true = (await Member().freeze(4, drop=())).tensors
    told = CONTRIBUTIONS["random"](true, None, 4)
    for name, value in true.items():
        assert float(told[name].norm()) == pytest.approx(float(value.norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("way", "wrong_inputs", "wrong_answers"),
    [("labels", range(2, 12), ()), ("one-in-ten", [11], ()), ("other-microbatch", range(3, 12), ()),
     ("activations", (), range(2, 12))],
)  # fmt: skip
def test_a_lie_in_what_is_computed_begins_at_its_microbatch_and_spares_others_checks(
    way: str, wrong_inputs: Collection[int], wrong_answers: Collection[int]
) -> None:
    computed, is_lying = list[torch.Tensor](), [False]

    def forward_loss(number: int, _: int, inputs: Any, *, accumulate: bool, only_at: int | None = None) -> Any:
        computed.append(inputs[TOKENS])
        return 1.0, Download(torch.full((64,), 2.0)), None

    backend = cast("StageBackend", SimpleNamespace(forward_loss=forward_loss))
    LyingBackend(backend, way, lambda: is_lying[0])
    for number in range(12):
        is_lying[0] = number >= 2
        own = {TOKENS: torch.arange(16).reshape(1, 16) + 100 * number}
        for accumulate in (True, False):
            _, answer, _ = backend.forward_loss(number, 0, own, accumulate=accumulate)
            assert answer is not None
            is_true = torch.equal(computed[-1], own[TOKENS]), bool((answer.wait() == 2.0).all())
            assert is_true == (
                not (accumulate and number in wrong_inputs),
                not (accumulate and number in wrong_answers),
            )
            assert float(answer.wait().norm()) == pytest.approx(16.0)
        if way != "other-microbatch":
            assert sorted(computed[-2].flatten().tolist()) == own[TOKENS].flatten().tolist()


@pytest.mark.parametrize(
    ("way", "kind", "num_rounds"),
    [pytest.param("labels", "computed", 10, marks=pytest.mark.slow), ("zeros", "computed", 3)],
)
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


def test_what_a_defence_does_alone_is_told_beside_what_all_do() -> None:
    found = {("synchronous", way, "all"): _figures() for way in (CHURN, MIXED, HONEST, "labels")}
    found["synchronous", "labels", "comparing"] = _figures(caught=0.0, falsely_named=1)
    figures = summary("synchronous", found)
    assert (figures["caught"], figures["falsely_named"]) == (1.0, 1)
    assert figures["alone"].keys() == {"comparing"}
    assert figures["alone"]["comparing"]["caught"] == 0.0


def test_an_unknown_way_to_lie_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--ways: 'gradients' is none of"):
        Options(ways=("gradients",))
    assert Options().ways == WAYS
