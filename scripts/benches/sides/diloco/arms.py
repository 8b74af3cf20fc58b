"""The arms that the diloco bench compares: their table, and the configuration of each.

Used by the bench, which starts a process for every arm and seed, and by that process. Every arm sees the same samples
in the same order. The length of a run is given as the outer steps of the arm with H = 200, which has the fewest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm import config as configs
from swarm.config import RunConfig

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
    """One way to train.

    Attributes:
        kind: `single` is one process without averaging; the others are settings of a run.
        inner_steps: H, inner steps that each worker takes in a round.
        batch_samples: samples of an inner step, and of a microbatch.
        learning_rate: the rate of the inner steps; None for the usual rate of the kind.
        churn: in every other round one of the workers is killed and a fresh one takes its place.
        changes: changes of the common configuration, by section.
    """

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
