"""The diloco bench: what its figures mean, and that its swarm is the swarm's own."""

import asyncio
from typing import Any

import pytest
import torch

from scripts.benches.diloco import goals
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.diloco_arm import ARMS, Arm, DrivenSwarm, run_config
from scripts.benches.sides.reference import Reference
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches


def _figures(loss: float, num_bytes: int = 100) -> dict[str, Any]:
    return {"val_loss": loss, "bytes_per_peer": num_bytes, "curve": [[10, loss + 1.0], [20, loss]]}


def test_differences_are_taken_seed_by_seed_and_absent_arms_left_out() -> None:
    by_arm = {"four": [_figures(2.0), _figures(4.0)], "churn": [_figures(2.02), _figures(4.02)]}
    found = goals(by_arm)
    assert found["churn_cost"] == pytest.approx((0.01 + 0.005) / 2)
    assert found["spread"]["churn_cost"] == pytest.approx(0.005 / 2**0.5)
    assert found["reached"] == {"churn_cost": True}


async def _train(arm: Arm, config: RunConfig, data: Microbatches, rounds: int, *replaced: int) -> DrivenSwarm:
    """A swarm after some rounds, stopped. In each of the last rounds a worker is replaced."""
    async with asyncio.TaskGroup() as tasks:
        swarm = DrivenSwarm(config, data, tasks)
        await swarm.start(arm.num_workers)
        for _ in range(rounds):
            await swarm.train_round()
        for place in replaced:
            await swarm.train_round(replaced=place)
        await swarm.stop()
    return swarm


async def test_the_synchronous_swarm_is_the_single_process(text: str) -> None:
    arm = ARMS["synchronous"]
    config, data = with_corpus(run_config(arm, seed=1, rounds_at_200=1, dataset=text))
    swarm = await _train(arm, config, data, 3)
    reference = Reference(config, data)
    for number in range(3):
        reference.step(number)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(swarm.anchor[name].detach(), weight)
    num_bytes = 4 * sum(weight.numel() for weight in reference.weights.values())
    # Of two members, each sends half of the vector and receives half: first contributions, and then their averages.
    # That is twice the vector for each worker and round.
    assert arm.num_workers == 2
    assert swarm.bytes_averaged == pytest.approx(3 * arm.num_workers * 2 * num_bytes, rel=1e-3)
