"""Trains nanoGPT's Shakespeare configuration for a CPU in a swarm of two stages with two peers each.

nanoGPT's README gives 1.88 as its validation loss. DiLoCo has inner batches of 6 samples, so that each of the two peers
takes as many steps as one process.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from scripts.benches.shared.common import BenchOptions, require_at_least, run_of, say, with_corpus, workplace
from scripts.benches.shared.swarm import SwarmProcesses
from swarm.config import AveragingConfig, RoundsConfig, RunConfig, Setting

BATCH = 12
PEERS_A_STAGE = 2
NANOGPT_LOSS = 1.88


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Train nanoGPT's Shakespeare model over a swarm."""

    dataset: str = field()
    """nanoGPT's Shakespeare text, a file. With another text the loss could not be compared."""
    iterations: int = 2000
    """Batches of 12 samples; for DiLoCo at least as many as --inner-steps, since in each inner step two peers do what
    one process does in an iteration."""
    inner_steps: int = 50
    """DiLoCo: steps that each peer takes in a round."""
    settings: tuple[Setting, ...] = ("synchronous", "diloco")
    """Which settings to train in."""
    seed: int = 0
    """Seed of the data's order and of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "diloco" in self.settings:
            require_at_least(self, {"iterations": self.inner_steps})


def run(options: Options) -> dict[str, Any]:
    figures: dict[str, Any] = {"nanogpt_validation_loss": NANOGPT_LOSS, "samples": BATCH * options.iterations}
    for setting in options.settings:
        config, _ = with_corpus(_config(options, setting))
        steps = BATCH * options.iterations // config.rounds.round_samples
        with workplace("nanogpt") as (folder, children):
            swarm = SwarmProcesses(config, children, folder / setting)
            say(f"{setting}: 2 x 2 peers start")
            swarm.start_peers([0, 1] * PEERS_A_STAGE)
            say(f"{setting}: {steps} rounds")
            rows = swarm.train("trainer", steps, evaluation_samples=2048)
            summary = json.loads((swarm.folder / "trainer" / "summary.json").read_text(encoding="utf-8"))
        figures[setting] = {
            "validation_loss": summary["validation_loss"], "rounds": steps,
            "seconds": sum(row["train/step_time"] for row in rows),
            "averaged_bytes": sum(row["averaging/bytes"] or 0 for row in rows),
        }  # fmt: skip
        say(f"{setting}: validation loss {summary['validation_loss']:.4f}")
    return figures


def shakespeare(dataset: str, iterations: int, seed: int = 0) -> RunConfig:
    return run_of(
        "nanogpt", width=128, layers=4, head_width=32, stages=2, length=64, microbatch=3, round_samples=BATCH,
        dataset=dataset, data={"seed": seed, "held_out_fraction": 0.1},
        optimizer={
            "learning_rate": 1e-3, "beta2": 0.99, "weight_decay": 0.1, "clip_norm": 1.0, "schedule": "cosine",
            "warmup_samples": 100 * BATCH, "total_samples": BATCH * max(iterations, 101), "final_fraction": 0.1,
        },
    )  # fmt: skip


def _config(options: Options, setting: Setting) -> RunConfig:
    synchronous = shakespeare(options.dataset, options.iterations, options.seed)
    if setting == "synchronous":
        return synchronous
    samples, inner_samples = BATCH * options.inner_steps, BATCH // PEERS_A_STAGE
    rounds = RoundsConfig(setting="diloco", round_samples=samples, inner_batch_samples=inner_samples)
    return dataclasses.replace(synchronous, rounds=rounds, averaging=AveragingConfig(codec="int8"))
