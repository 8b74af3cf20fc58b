"""Microbatches: the deterministic order in which a run sees its text.

Trainers ask for microbatch i, and any trainer can make any other trainer's microbatches again, because a microbatch is
a pure function of the configuration and i. Evaluation asks for the held-out windows.

The training part of a text is cut into windows of `sequence_length` tokens, each with one more token, the next
window's first, as its last target. Conversations and completions are sequences already (data/packing). An epoch visits
every sequence once, in an order of its own.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarm.config import DataConfig
from swarm.data.corpora import Corpus
from swarm.training.samples import TOKENS

_NUM_FEISTEL_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_Words = npt.NDArray[np.uint64]


class Microbatches:
    """The samples of a run, by number."""

    def __init__(self, corpus: Corpus, config: DataConfig) -> None:
        self._training = corpus.training
        self._held_out = corpus.held_out
        self._sequence_length = config.sequence_length
        self._microbatch_size = config.microbatch_size
        self._seed = config.seed
        self.num_windows = self._num_sequences(self._training)
        """Samples in an epoch."""

    def tokens(self, index: int) -> npt.NDArray[np.int32]:
        """The token ids of microbatch `index` [microbatch_size, sequence_length + 1]."""
        tokens: npt.NDArray[np.int32] = self.samples(index)[TOKENS].numpy()
        return tokens

    def samples(self, index: int) -> dict[str, torch.Tensor]:
        """Microbatch `index`, as it travels (training/samples).

        Sample j of microbatch i is sample i * microbatch_size + j of the run; epochs follow each other without a
        gap, so that a microbatch may begin in one and end in the next.
        """
        first = index * self._microbatch_size
        samples = np.arange(first, first + self._microbatch_size, dtype=np.uint64)
        epochs, positions = np.divmod(samples, np.uint64(self.num_windows))
        return self._gather(self._training, _permute(positions, self.num_windows, seed=self._seed, epochs=epochs))

    def held_out(self, num_samples: int) -> list[dict[str, torch.Tensor]]:
        """About `num_samples` sequences spread evenly over the held-out part, always the same ones.

        Returns microbatches: the last one is smaller if `num_samples` is no multiple. Asked for more sequences than
        there are, it returns each once.
        """
        num_windows = self._num_sequences(self._held_out)
        num_samples = min(num_samples, num_windows)
        windows = np.arange(num_samples, dtype=np.uint64) * np.uint64(num_windows) // np.uint64(num_samples)
        return [
            self._gather(self._held_out, windows[first : first + self._microbatch_size])
            for first in range(0, num_samples, self._microbatch_size)
        ]

    def _num_sequences(self, part: npt.NDArray[Any]) -> int:
        return (len(part) - 1) // self._sequence_length if part.dtype.names is None else len(part)

    def _gather(self, part: npt.NDArray[Any], numbers: _Words) -> dict[str, torch.Tensor]:
        if part.dtype.names is None:
            starts = numbers.astype(np.int64) * self._sequence_length
            fields = {TOKENS: part[starts[:, None] + np.arange(self._sequence_length + 1)]}
        else:
            rows = part[numbers.astype(np.int64)]
            fields = {name: rows[name] for name in part.dtype.names}
        return {name: torch.from_numpy(values.astype(np.int32)) for name, values in fields.items()}


def _permute(positions: _Words, size: int, *, seed: int, epochs: _Words) -> _Words:
    """Each position's place in its epoch's permutation of range(size).

    A Feistel network permutes the next larger power of four, whatever its round function. A position that lands
    outside the range is permuted again until it is inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"). So the permutation costs no memory, however long the corpus is.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    keys = _mix(_mix(np.full_like(epochs, seed % 2**64)) + epochs)
    permuted = positions
    outside = np.ones(len(positions), dtype=bool)
    while outside.any():
        left, right = permuted >> half_bits, permuted & mask
        for round_number in range(_NUM_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(_mix(keys + np.uint64(round_number)) ^ right) & mask)
        permuted = np.where(outside, (left << half_bits) | right, permuted)
        outside = permuted >= size
    return permuted


def _mix(words: _Words) -> _Words:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): every bit of the input moves every other."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
