"""A microbatch under way: its index, its round, the stages that count it, and its samples, which travel unchanged.

A target is a token whose prediction counts; losses are sums over targets, and a microbatch weighs as much as it has
targets. In plain text every token but a sample's first is one.

    tokens      [B, T + 1]  each column predicts the next one
    targets     [B, T + 1]  1 for a token that is a target, else 0; only in runs on conversations or completions
    documents   [B, T + 1]  the document of each token, counted from 0 in each row; only where samples are packed

All are int32. Nothing is predicted across the border of two documents.

Shapes: B samples (rows), T tokens, T1 = T + 1.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarm.config import DataConfig
from swarm.errors import MalformedMessage
from swarm.types import Block, PeerId

TOKENS, TARGETS, DOCUMENTS = "tokens", "targets", "documents"
NO_TARGET = -100
"""The number that marks a position without a target; such a position does not count in the loss."""
Samples = Mapping[str, torch.Tensor]
TokenIds = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids, unsigned, as narrow as the vocabulary allows."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    index: int
    round: int
    num_samples: int
    accumulate_only_at: int | None = None
    since: float | None = None
    """When stage 0 was first asked to take it, by the event loop's clock; None at a trainer."""

    @property
    def way_seconds(self) -> float:
        return 0.0 if self.since is None else asyncio.get_running_loop().time() - self.since

    @property
    def is_replay(self) -> bool:
        """Whether this microbatch is run again, for a stage that has lost it."""
        return self.accumulate_only_at is not None

    def counts_at(self, stage: int) -> bool:
        """Whether a stage accumulates this microbatch's gradient. In a replay, only the stage that lost it does."""
        return self.accumulate_only_at in (None, stage)

    def known_by(self, route: Mapping[Block, PeerId]) -> dict[Block, PeerId]:
        """The peers of a route that still know the microbatch. For a replay, the stage that lost it is left out."""
        return {block: peer for block, peer in route.items() if block.stage != self.accumulate_only_at}

    def answers_gradient(self, stage: int) -> bool:
        """Whether a stage's answer contains the gradient of its input. For a replay, only later stages' answers do."""
        return self.accumulate_only_at is None or self.accumulate_only_at < stage


@dataclass(frozen=True)
class Amount:
    """How much data there is: in samples, which rounds count, and in targets, over which means are taken."""

    samples: int = 0
    targets: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.samples + other.samples, self.targets + other.targets)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.samples - other.samples, self.targets - other.targets)


NOTHING = Amount()


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The narrowest little-endian unsigned type that holds every id below `vocab_size`."""
    if vocab_size <= 2**8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def names(data: DataConfig) -> list[str]:
    return [TOKENS, *([TARGETS] if data.has_targets else []), *([DOCUMENTS] if data.is_packed else [])]


def of(tensors: Samples) -> dict[str, torch.Tensor]:
    """The tensors, among these, that a stage hands on unchanged."""
    return {name: tensors[name] for name in (TOKENS, TARGETS, DOCUMENTS) if name in tensors}


def has_target(samples: Samples) -> torch.Tensor | None:
    """Whether each column has to predict its next token: bool [B, T]; None if all columns do."""
    if TARGETS not in samples:
        return None
    has_target_BT = samples[TARGETS][:, 1:] == 1
    if DOCUMENTS in samples:
        documents_BT1 = samples[DOCUMENTS]
        has_target_BT &= documents_BT1[:, 1:] == documents_BT1[:, :-1]
    return has_target_BT


def targets(samples: Samples) -> torch.Tensor:
    """The token that each column has to predict, or NO_TARGET: int64 [B, T], on the device of the samples."""
    targets_BT, has_target_BT = samples[TOKENS][:, 1:].long(), has_target(samples)
    return targets_BT if has_target_BT is None else targets_BT.masked_fill(~has_target_BT, NO_TARGET)


def documents(samples: Samples) -> torch.Tensor | None:
    """The document of each column that predicts: int32 [B, T]; None if each row is one document."""
    return samples[DOCUMENTS][:, :-1] if DOCUMENTS in samples else None


def amount(samples: Samples) -> Amount:
    num_rows, num_columns = samples[TOKENS].shape
    has_target_BT = has_target(samples)
    num_targets = num_rows * (num_columns - 1) if has_target_BT is None else int(has_target_BT.sum())
    return Amount(num_rows, num_targets)


def require_sound(samples: Samples, vocab_size: int) -> None:
    """Raise MalformedMessage for a token beyond the vocabulary, or for impossible targets or documents."""
    tokens_BT1 = samples[TOKENS]
    if int(tokens_BT1.min()) < 0 or int(tokens_BT1.max()) >= vocab_size:
        raise MalformedMessage(f"a token is outside the vocabulary of {vocab_size}")
    if TARGETS in samples and not bool(((samples[TARGETS] == 0) | (samples[TARGETS] == 1)).all()):
        raise MalformedMessage("a token neither is a target nor is none")
    if DOCUMENTS in samples:
        documents_BT1 = samples[DOCUMENTS]
        steps_BT = documents_BT1[:, 1:] - documents_BT1[:, :-1]
        if bool(documents_BT1[:, 0].any()) or not bool(((steps_BT == 0) | (steps_BT == 1)).all()):
            raise MalformedMessage("a row's documents do not follow each other from 0 on")
