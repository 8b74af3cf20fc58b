"""Commits of rounds to a stage's weights, as averaging makes them, and the state that follows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swarm.stage.weights import StageWeights
from swarm.training.round_member import RoundResult
from swarm.training.scaling import squared_norm_of


def result_of(
    round_number: int, average: Mapping[str, torch.Tensor], *, total_squared_norm: float = 0.0, num_samples: int = 16,
    num_members: int = 1, lineage: str = "", contributed: bool = True, closing: int | None = None,
    amended: str = "",
) -> RoundResult:  # fmt: skip
    return RoundResult(
        round=round_number, tensors=average, num_samples=num_samples, squared_norm=total_squared_norm,
        total_squared_norm=total_squared_norm, members=tuple(map(str, range(num_members))), lineage=lineage,
        attempts=1, digest="", contributed=contributed, closing=closing,
        amended=amended,
    )  # fmt: skip


def end_round(weights: StageWeights, average: Mapping[str, torch.Tensor], **options: Any) -> float:
    """End the present round with an average. Returns the learning rate that was used."""
    return weights.commit(result_of(weights.round.number, average, **options))


def end_rounds(
    stages: Sequence[StageWeights], averages: Sequence[Mapping[str, torch.Tensor]] | None = None, **options: Any
) -> None:
    """End the round of all stages of a model, clipped by its norm. Without averages, each stage is its only member."""
    if averages is None:
        averages = [weights.contribute().tensors for weights in stages]
    total = sum(squared_norm_of(average.values()) for average in averages)
    for weights, average in zip(stages, averages, strict=True):
        end_round(weights, average, total_squared_norm=total, **options)


def state_tensors(weights: StageWeights) -> dict[str, torch.Tensor]:
    """A copy of the state of the current round, on the CPU."""
    return {name: value.to("cpu", copy=True) for name, value in weights.state().items()}
