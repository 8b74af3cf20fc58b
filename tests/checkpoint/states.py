"""The states of real stages, to write and to read back. They are the same for every number of stages."""

import dataclasses
import hashlib
from pathlib import Path

import torch

from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.model.stages import build_stage
from swarm.stage.stage import weights_of
from swarm.stage.weights import StageWeights
from tests.support.commits import end_round

CONFIG = RunConfig(
    run="checkpoints", model=ModelConfig(num_layers=4, d_model=16, num_heads=2, vocab_size=32),
    data=DataConfig(sequence_length=8, microbatch_size=2), rounds=RoundsConfig(setting="synchronous", round_samples=16),
    optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=0.1),
)  # fmt: skip


def cut(num_stages: int, config: RunConfig = CONFIG) -> RunConfig:
    """The configuration of the same run in this many stages."""
    return dataclasses.replace(config, stages=StagesConfig(num_stages=num_stages))


def trained(config: RunConfig, stage: int, num_rounds: int) -> StageWeights:
    """A stage after some rounds, each with gradients that follow from the parameters' names."""
    weights = weights_of(config, build_stage(config, stage, device="cpu"), lineage=_hash(f"stage {stage}"))
    while weights.round.number < num_rounds:
        train_round(weights)
    return weights


def train_round(weights: StageWeights) -> None:
    """Commit one more round."""
    average = {}
    for name, master in weights.masters.items():
        generator = torch.Generator().manual_seed(sum(name.encode()) + weights.round.number)
        average[name] = torch.randn(master.shape, generator=generator)
    weights.close()
    end_round(weights, average, total_squared_norm=1.0, lineage=_hash(weights.round.lineage))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def header_of(config: RunConfig, stage: int, weights: StageWeights, *, highest_microbatch: int = 7) -> Header:
    """The header of a checkpoint of these weights."""
    return Header(
        config=config, stage=stage, round=weights.round.number, run_samples=weights.round.run_samples,
        lineage=weights.round.lineage, highest_microbatch=highest_microbatch, state_digest=weights.state_digest(),
    )  # fmt: skip


def write_cut(folder: Path, config: RunConfig, num_rounds: int) -> list[Path]:
    """Write checkpoints of all stages after some rounds."""
    paths = []
    for stage in range(config.stages.num_stages):
        weights = trained(config, stage, num_rounds)
        paths.append(file.write(folder, header_of(config, stage, weights), weights.state_tensors(), owner="test"))
    return paths


def shapes_of(weights: StageWeights) -> dict[str, torch.Size]:
    """The shapes of the parameters that a folder is asked for."""
    return {name: master.shape for name, master in weights.masters.items()}
