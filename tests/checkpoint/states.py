"""The states of real stages, to write and to read back. They are the same for every number of stages."""

import dataclasses
import hashlib
from pathlib import Path

import torch

from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, Setting, StagesConfig
from swarm.model.stages import build_stage
from swarm.stage.stage import weights_of
from swarm.stage.state import digest_of
from swarm.stage.weights import StageWeights
from swarm.types import Block
from tests.support.commits import end_round, state_tensors

CONFIG = RunConfig(
    run="checkpoints", model=ModelConfig(num_layers=4, d_model=16, num_heads=2, vocab_size=32),
    data=DataConfig(sequence_length=8, microbatch_size=2), rounds=RoundsConfig(setting="synchronous", round_samples=16),
    optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=0.1),
)  # fmt: skip


def cut(num_stages: int, config: RunConfig = CONFIG) -> RunConfig:
    """The configuration of the same run in this many stages."""
    return dataclasses.replace(config, stages=StagesConfig(num_stages=num_stages))


def trained(config: RunConfig, stage: int, num_rounds: int, variant: int = 0) -> StageWeights:
    """A block after some rounds, each with gradients that follow from the parameters' names and the variant."""
    weights = weights_of(config, build_stage(config, stage, device="cpu"), lineage=_hash(f"stage {stage}"))
    while weights.round.number < num_rounds:
        train_round(weights, variant)
    return weights


def train_round(weights: StageWeights, variant: int = 0) -> None:
    """Commit one more round."""
    average = {}
    for name, master in weights.masters.items():
        generator = torch.Generator().manual_seed(sum(name.encode()) + weights.round.number + 1000 * variant)
        average[name] = torch.randn(master.shape, generator=generator)
    weights.contribute()
    end_round(weights, average, total_squared_norm=1.0, lineage=_hash(weights.round.lineage))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def header_of(
    config: RunConfig, stage: int, weights: StageWeights, *, highest_microbatch: int = 7, variant: int = 0
) -> Header:
    """The header of a checkpoint of these weights."""
    return Header(
        config=config, stage=stage, round=weights.round.number, run_samples=weights.round.run_samples,
        lineage=weights.round.lineage, highest_microbatch=highest_microbatch, state_digest=digest_of(weights.state()),
        variant=variant,
    )  # fmt: skip


def write_cut(folder: Path, config: RunConfig, num_rounds: int) -> list[Path]:
    """Write checkpoints of all blocks after some rounds."""
    return [write_block(folder, config, block, num_rounds) for block in config.blocks]


def write_block(folder: Path, config: RunConfig, block: Block, num_rounds: int) -> Path:
    weights = trained(config, block.stage, num_rounds, block.variant)
    header = header_of(config, block.stage, weights, variant=block.variant)
    return file.write(folder, header, state_tensors(weights), owner="test")


def with_paths(config: RunConfig, setting: Setting = "synchronous") -> RunConfig:
    """The configuration of a run with four paths through three stages, the second of which all share."""
    stages = StagesConfig(num_stages=3, variants=(2, 1, 2))
    return dataclasses.replace(config, stages=stages, rounds=RoundsConfig(setting=setting, round_samples=16))


def shapes_of(weights: StageWeights) -> dict[str, torch.Size]:
    """The shapes of the parameters that a folder is asked for."""
    return {name: master.shape for name, master in weights.masters.items()}
