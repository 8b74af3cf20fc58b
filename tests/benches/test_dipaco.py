"""The dipaco bench: that its peers are the swarm's own, and what its figures mean."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benches.dipaco import summary
from scripts.benches.shared.common import run_of, with_corpus
from scripts.benches.sides.dipaco_arm import PathSwarm
from scripts.benches.sides.plain_training import PlainDiloco
from swarm.config import RunConfig


def _config(text: str, **data: Any) -> RunConfig:
    return run_of(
        "dipaco", width=32, layers=2, head_width=16, variants=(2, 2) if "paths" in data else (1, 1), setting="diloco",
        length=16, microbatch=2, round_samples=32, rounds={"inner_batch_samples": 2}, dataset=text, data=data,
        optimizer={"name": "adamw", "clip_norm": 1e6}, averaging={"overlap_steps": 0},
    )  # fmt: skip


async def test_peers_of_one_path_train_as_plain_diloco_does(text: str, tmp_path: Path) -> None:
    config, data = with_corpus(_config(text), tmp_path / "corpora")
    swarm, plain = PathSwarm(config, data, 4), PlainDiloco(config, data, 4)
    for number in range(2):
        await swarm.train_round(number)
        plain.step(number)
    (weights,) = swarm.weights_of_paths
    assert weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


def _run(loss: float) -> dict[str, Any]:
    return {
        "loss": loss, "by_kind": {"c": loss}, "bytes_per_peer": 8.0, "curve": [[1, loss]], "seconds": 1.0,
        "rerouted_loss": loss + 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(("routed", "passed"), [((1.9, 3.9), True), ((1.98, 3.96), False)])
def test_seeds_are_compared_one_by_one(routed: tuple[float, float], passed: bool) -> None:
    found = summary({"routed": [*map(_run, routed)], "single": [_run(2.0), _run(4.0)], "random": [_run(2.0)] * 2})
    assert found["better_than_single"] == pytest.approx((2 - routed[0]) / 4 + (4 - routed[1]) / 8)
    assert found["passed"] is passed
    mean = sum(routed) / 2
    assert found["routing"] == {"learned": pytest.approx(mean), "random": 2.0, "rerouted": pytest.approx(mean + 0.5)}
    assert "better_than_total" not in found
    assert summary({"single": [_run(2.0)]})["passed"] is None
