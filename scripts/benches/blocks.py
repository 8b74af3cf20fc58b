"""How much does a model's loss rise when the shards of its layers exchange less?"""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.benches.nanogpt import BATCH, shakespeare
from scripts.benches.shared.common import BenchOptions, compute_like_peers, say, with_corpus
from scripts.benches.sides.reference import HeldOut, Reference
from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.model.shards import spans

ARMS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",) * 4, "spd": ("spd",) * 4, "parallel": ("parallel",) * 4,
    "tp_ends": ("tp", "parallel", "parallel", "tp"),
}  # fmt: skip
LARGEST_DIFFERENCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Train nanoGPT's Shakespeare model with each block type."""

    dataset: str = field()
    """nanoGPT's Shakespeare text, a file."""
    iterations: int = 1000
    """Batches of 12 samples."""
    shards: int = 2
    """Shards of each layer: 2 or 4."""
    seed: int = 0
    """Seed of the data's order and of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards not in (2, 4):
            raise ValueError(f"--shards must be 2 or 4, not {self.shards}: the model has 4 heads")


def run(options: Options) -> dict[str, Any]:
    compute_like_peers()
    figures: dict[str, Any] = {}
    for name, types in ARMS.items():
        config, data = with_corpus(_config(options, types))
        held_out, training = HeldOut(config, data), Reference(config, data)
        started = time.monotonic()
        for iteration in range(options.iterations):
            training.step(iteration)
            if iteration % 100 == 99:
                say(f"{name}: iteration {iteration + 1} of {options.iterations}")
        loss = held_out.loss(training.weights)
        seconds, num_sums = time.monotonic() - started, 2 * len(spans(config.model, range(config.model.num_layers)))
        figures[name] = {"validation_loss": loss, "block_types": types, "sums": num_sums, "seconds": seconds}
        say(f"{name}: validation loss {loss:.4f}")
    found: dict[str, Any] = {"blocks": figures, "samples": BATCH * options.iterations, "shards": options.shards}
    losses = {name: arm["validation_loss"] - figures["tp"]["validation_loss"] for name, arm in figures.items()}
    return found | {"apart_from_tp": [name for name, apart in losses.items() if abs(apart) > LARGEST_DIFFERENCE]}


def _config(options: Options, types: tuple[str, ...]) -> RunConfig:
    config = shakespeare(options.dataset, options.iterations, options.seed)
    model: ModelConfig = dataclasses.replace(config.model, block_types=types, num_shards=options.shards)
    # With two stages, each would have an end at which shards meet.
    return dataclasses.replace(
        config, model=model, stages=StagesConfig(num_stages=1),
        data=dataclasses.replace(config.data, microbatch_size=BATCH),
    )  # fmt: skip
