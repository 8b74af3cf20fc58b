"""The arms that the bench `diloco` compares, and a process that trains one of them with one seed.

    python -m scripts.benches.sides.diloco_arm ARM SEED ROUNDS_AT_200 DATASET

Every arm sees the same samples in the same order. The length of a run is given as the outer steps of the arm with H =
200, which has the fewest. The last line of stdout is one JSON object.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from peers.shared import logs, process
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.driven_swarm import DrivenSwarm
from scripts.benches.sides.reference import HeldOut, Reference
from swarm import config as configs
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches

NUM_WORKERS = 2
INNER_BATCH_SAMPLES = 16
"""The samples of a microbatch, which are also the samples of one worker's inner step. One arm has half as many."""
LONGEST_ROUND = 200  # Inner steps a worker and round of the arm with the fewest rounds
LEARNING_RATES = {"single": 5e-3, "synchronous": 5e-3, "diloco": 8e-3}
OUTER = {"learning_rate": 0.7, "momentum": 0.8}  # The best rate and momentum that a short search found
SHORT_ROUNDS_RATE = 5e-3
SHORT_ROUNDS_OUTER = {"learning_rate": 0.7, "momentum": 0.5}
"""The outer optimizer with H = 10. There pseudo-gradients are more alike from round to round, and a longer momentum
would add up too many of them."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train, with H inner steps of each worker in a round. With `churn` one of the workers is killed in
    every other round, and a fresh one takes its place. `changes` are those of the common configuration, by section."""

    kind: Literal["single", "synchronous", "diloco"] = "diloco"
    inner_steps: int = 50
    num_workers: int = NUM_WORKERS
    batch_samples: int = INNER_BATCH_SAMPLES
    learning_rate: float | None = None
    churn: bool = False
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


SPARSE = {"codec": "topk", "top_k": 112, "values": "2bit", "indices": "elias-fano", "feedback_decay": 0.99}
DCT = {"codec": "dct-topk", "top_k": 64, "values": "lut8", "indices": "12bit", "feedback_decay": 0.95}
NO_MOMENTUM = {"learning_rate": 1.0, "momentum": 0.0}  # For codecs with error feedback, which replaces momentum

ARMS: Mapping[str, Arm] = {
    "single": Arm(kind="single", inner_steps=1),
    "synchronous": Arm(kind="synchronous", inner_steps=1),
    "h10": Arm(inner_steps=10, learning_rate=SHORT_ROUNDS_RATE, changes={"outer": SHORT_ROUNDS_OUTER}),
    "h50": Arm(),
    "h200": Arm(inner_steps=LONGEST_ROUND),
    "int8": Arm(changes={"averaging": {"codec": "int8"}}),
    "int4": Arm(changes={"averaging": {"codec": "int4"}}),
    "dct-topk": Arm(changes={"averaging": DCT, "outer": NO_MOMENTUM}),
    "overlap": Arm(changes={"averaging": {"overlap_steps": 5}}),
    "four": Arm(num_workers=4),
    # Each of the four workers then takes as many steps as each of two workers with the whole batch.
    "four-half": Arm(num_workers=4, batch_samples=INNER_BATCH_SAMPLES // 2),
    "churn": Arm(num_workers=4, churn=True),
    "int8-h10": Arm(
        inner_steps=10,
        learning_rate=SHORT_ROUNDS_RATE,
        changes={"averaging": {"codec": "int8"}, "outer": SHORT_ROUNDS_OUTER},
    ),
    "sparse-h10": Arm(
        inner_steps=10, learning_rate=SHORT_ROUNDS_RATE, changes={"averaging": SPARSE, "outer": NO_MOMENTUM}
    ),
}


def total_samples(rounds_at_200: int) -> int:
    return rounds_at_200 * LONGEST_ROUND * NUM_WORKERS * INNER_BATCH_SAMPLES


def num_rounds(config: RunConfig, rounds_at_200: int) -> int:
    """Outer steps of an arm with that configuration; optimizer steps in the synchronous setting."""
    return total_samples(rounds_at_200) // config.rounds.round_samples


def run_config(arm: Arm, *, seed: int, rounds_at_200: int, dataset: str) -> RunConfig:
    """The run that an arm trains. Raises ValueError."""
    samples = total_samples(rounds_at_200)
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "d_model": 32, "num_heads": 2},
        "stages": {"num_stages": 1},
        "data": {
            "dataset": dataset, "seed": seed, "sequence_length": 32, "microbatch_size": arm.batch_samples,
            "held_out_fraction": 0.02,
        },
        "rounds": {
            "setting": "diloco" if arm.kind == "diloco" else "synchronous",
            "round_samples": arm.num_workers * arm.inner_steps * arm.batch_samples,
            "inner_batch_samples": arm.batch_samples,
        },
        "optimizer": {
            "learning_rate": arm.learning_rate or LEARNING_RATES[arm.kind], "schedule": "cosine",
            "total_samples": samples, "warmup_samples": samples // 50,
        },
        "outer": OUTER,
        "averaging": {"overlap_steps": 0},
    }  # fmt: skip
    for section, changes in arm.changes.items():
        values[section] = {**values.get(section, {}), **changes}
    return configs.from_dict({"run": "bench-diloco", **values}, source="the diloco bench")


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
