"""Microbatches of which few tokens are targets, in rows of several documents."""

import dataclasses
from typing import Any

import torch

from scripts.benches.shared.common import run_of
from swarm.config import RunConfig
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS

SHARES = (1.0, 0.02, 0.0, 0.3)
"""The share of tokens that are targets, by a microbatch's number modulo 4."""


def partial_config(*, num_stages: int = 2, packing: bool = True, **sections: Any) -> RunConfig:
    # With a smaller epsilon AdamW would make whole steps of gradients that are nothing but rounding.
    config = run_of(
        "partial", width=32, layers=3, head_width=16, stages=num_stages, length=16, microbatch=2, round_samples=8,
        dataset="x.jsonl", model={"vocab_size": 64}, data={"format": "chat", "packing": packing},
        optimizer={"learning_rate": 1e-2, "epsilon": 1e-3},
    )  # fmt: skip
    return dataclasses.replace(config, **sections)


def partial_samples(config: RunConfig, number: int) -> dict[str, torch.Tensor]:
    """Microbatch `number`, a function of its number, as it travels."""
    data = config.data
    shape = (data.microbatch_size, data.sequence_length + 1)
    generator = torch.Generator().manual_seed(number)
    tokens_BT1 = torch.randint(config.model.vocab_size, shape, generator=generator, dtype=torch.int32)
    targets_BT1 = (torch.rand(shape, generator=generator) < SHARES[number % len(SHARES)]).int()
    steps_BT1 = (torch.rand(shape, generator=generator) < 0.2).int()
    steps_BT1[:, 0] = 0
    samples = {TOKENS: tokens_BT1, TARGETS: targets_BT1}
    return {**samples, DOCUMENTS: steps_BT1.cumsum(dim=1, dtype=torch.int32)} if data.is_packed else samples


class PartialData:
    """Gives these microbatches as data/microbatches does others."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def samples(self, index: int) -> dict[str, torch.Tensor]:
        return partial_samples(self._config, index)
