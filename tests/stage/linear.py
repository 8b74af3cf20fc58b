"""Weights of one linear layer in either setting, and gradients for them."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from swarm.config import AveragingConfig, DataConfig, ModelConfig, OptimizerConfig, OuterConfig, RoundsConfig, RunConfig
from swarm.events import Event, Events, Step
from swarm.stage.stage import weights_of
from swarm.stage.weights import StageWeights
from swarm.training.samples import Amount
from swarm.types import Block
from tests.support.commits import end_round

INNER_SAMPLES = 4


def config_of(setting: str, **optimizer: float | str) -> RunConfig:
    assert setting in ("synchronous", "diloco")
    return RunConfig(
        data=DataConfig(microbatch_size=2),
        rounds=RoundsConfig(
            setting="synchronous" if setting == "synchronous" else "diloco",
            round_samples=16,
            inner_batch_samples=INNER_SAMPLES,
        ),
        outer=OuterConfig(learning_rate=0.7, momentum=0.9),
        optimizer=OptimizerConfig(**{"learning_rate": 0.05, "clip_norm": 0.0, **optimizer}),  # type: ignore[arg-type]  # any field
    )


def linear(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 4)


class Steps(Events):
    """Keeps only the events about inner steps: for each the bucket, and its number of samples."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def write(self, event: Event, block: Block | None = None) -> None:
        if isinstance(event, Step):
            self.taken.append((event.bucket, event.samples))


def weights_in(setting: str, **optimizer: float | str) -> StageWeights:
    return weights_of(config_of(setting, **optimizer), linear(), lineage="")


def recorded() -> tuple[StageWeights, Steps]:
    """DiLoCo weights, and the steps that they take."""
    steps = Steps()
    return weights_of(config_of("diloco"), linear(), lineage="", events=steps), steps


def gradients(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(p.shape, generator=generator) for name, p in linear().named_parameters()}


def values_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def assert_same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name].detach(), right[name].detach(), rtol=1e-6, atol=1e-7, msg=name)


def accumulate(weights: StageWeights, *numbers: int) -> None:
    """Accumulate acknowledged gradients as the backend does. Each is the mean over two samples with one target."""
    for number in numbers:
        weights.buckets.open().add([2 * gradient for gradient in gradients(number).values()], Amount(2, 2))
        weights.step_if_due()


def overlapping(overlap_steps: int, num_fragments: int = 1) -> StageWeights:
    config = config_of("diloco")
    averaging = AveragingConfig(overlap_steps=overlap_steps, num_fragments=num_fragments)
    model = ModelConfig(num_layers=12)
    return weights_of(dataclasses.replace(config, averaging=averaging, model=model), linear(), lineage="")


def commit_without_steps(weights: StageWeights, *, contributed: bool = True) -> None:
    average = {name: gradients(20 + weights.round.number)[name] for name in weights.contribute().tensors}
    end_round(weights, average, num_members=2, lineage="a", contributed=contributed)
