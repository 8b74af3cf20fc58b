"""A process that trains one arm of the diloco bench with one seed.

    python -m scripts.benches.sides.diloco.arm ARM SEED ROUNDS_AT_200 DATASET

Its last line of stdout is one JSON object. torch has one thread, and everything runs on one event loop.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from peers.shared import logs, process
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.diloco.arms import ARMS, Arm, num_rounds, run_config
from scripts.benches.sides.diloco.driven_swarm import DrivenSwarm
from scripts.benches.sides.reference import HeldOut, Reference
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches

CURVE_POINTS = 5


@dataclass(eq=False)
class Curve:
    """Held-out losses during training, and at its end."""

    config: RunConfig
    data: Microbatches
    num_rounds: int
    points: list[tuple[int, float]] = field(default_factory=list)  # Tokens, and nats a token

    def __post_init__(self) -> None:
        self._held_out = HeldOut(self.config, self.data)

    def after_round(self, number: int, weights: Mapping[str, torch.Tensor]) -> None:
        done = number + 1
        if done * CURVE_POINTS // self.num_rounds > number * CURVE_POINTS // self.num_rounds:
            tokens = done * self.config.rounds.round_samples * self.config.data.sequence_length
            self.points.append((tokens, self._held_out.loss(weights)))


def train(arm: Arm, config: RunConfig, data: Microbatches, rounds: int) -> dict[str, Any]:
    started_at = time.perf_counter()
    curve = Curve(config, data, rounds)
    averaging = _train_single(config, data, curve) if arm.kind == "single" else asyncio.run(_train(arm, curve))
    tokens, val_loss = curve.points[-1]
    return {
        "val_loss": val_loss, "outer_steps": rounds, "tokens": tokens, **averaging, "curve": curve.points,
        "seconds": time.perf_counter() - started_at,
    }  # fmt: skip


def _train_single(config: RunConfig, data: Microbatches, curve: Curve) -> dict[str, Any]:
    reference = Reference(config, data)
    for number in range(curve.num_rounds):
        reference.step(number)
        curve.after_round(number, reference.weights)
    return {"bytes_per_peer": 0, "compression_ratio": 1.0, "lost_tokens": 0, "attempts": 0}


async def _train(arm: Arm, curve: Curve) -> dict[str, Any]:
    ratios: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        swarm = DrivenSwarm(curve.config, curve.data, tasks)
        await swarm.start(arm.num_workers)
        for number in range(curve.num_rounds):
            # A different worker is replaced each time, so that sometimes the leader is replaced.
            await swarm.train_round(replaced=number // 2 % arm.num_workers if arm.churn and number % 2 else None)
            curve.after_round(number, swarm.anchor)
            ratios.append(swarm.workers[0].member.reports[-1].compression_ratio)
        await swarm.stop()
    return {
        "bytes_per_peer": swarm.bytes_averaged // arm.num_workers, "compression_ratio": sum(ratios) / len(ratios),
        "lost_tokens": swarm.num_lost_samples * curve.config.data.sequence_length, "attempts": swarm.num_attempts,
    }  # fmt: skip


def main(name: str, seed: int, rounds_at_200: int, dataset: str) -> None:
    torch.set_num_threads(1)
    logs.setup_logging(f"bench diloco {name}", "warning")
    arm = ARMS[name]
    config, data = with_corpus(run_config(arm, seed=seed, rounds_at_200=rounds_at_200, dataset=dataset))
    print(json.dumps(train(arm, config, data, num_rounds(config, rounds_at_200))))


if __name__ == "__main__":
    process.prepare_environment()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
