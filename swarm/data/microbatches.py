"""Microbatches: the deterministic order in which a run sees its text.

A microbatch is a pure function of the configuration and its index i, so any trainer can make any other's again.

The training part of a text is cut into windows of `sequence_length` tokens. Each also has the first token of the next
window, as its last target. Conversations and completions are sequences already (data/documents). An epoch visits every
sequence once, in an order of its own. With `data.weights` an epoch has the number of sequences of each dataset that the
weights say, and the next epoch goes on where this one ended in each dataset. Where an amendment changes the weights
or the text, microbatches from its round on are those of a run that has always had the new ones.

With `data.part_rows` epoch k has the samples of part k of each dataset (data/parts), as many as part 0 has: of a part
with more the rest is left out, and one with fewer begins again at its own start.

With `data.paths` all this holds for each dataset by itself. Of P paths microbatch i takes the one with number i % P,
and is of that path's dataset; paths with the same dataset take its microbatches in turn.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarm.config import DataConfig
from swarm.data.corpora import Corpus, SourceTokens
from swarm.data.prepared import Prepared
from swarm.errors import CorpusMismatch, SwarmError
from swarm.machine.background import begun
from swarm.training import samples
from swarm.training.samples import TOKENS

_NUM_FEISTEL_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_Words = npt.NDArray[np.uint64]
_Part = npt.NDArray[Any]
"""Tokens or sequences of one dataset."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """The held-out samples with which one dataset is evaluated.

    Attributes:
        batches: microbatches in their wire form (training/samples); the last one may be smaller.
        share: the number of sequences of the held-out part for which each of the samples stands.
        paths: the paths that train on this dataset, by `data.paths`; empty if all do.
    """

    name: str
    batches: Sequence[dict[str, torch.Tensor]]
    share: float
    paths: tuple[int, ...] = ()


class Microbatches:
    def __init__(self, corpus: Corpus, config: DataConfig, paths: Collection[int] = ()) -> None:
        """`paths` are those that this process runs, if the corpus has only their datasets."""
        self.corpus = corpus
        self._made_of = corpus, config, paths
        self._weighted: dict[tuple[float, ...], Microbatches] = {config.weights: self}
        self._microbatch_size = config.microbatch_size
        names = dict(zip(config.datasets, config.source_names, strict=True))
        here = config.datasets_of(paths)
        self._names = [names[dataset] for dataset in here]
        self._texts = [_Text(corpus.sources, config)]
        """One of all datasets, or with `data.paths` one of each."""
        self._by_path: Mapping[int, tuple[_Text, tuple[int, ...]]] = {}
        """With `data.paths`: the text of each path, and all paths that have it."""
        self._num_paths = len(config.paths)
        if config.paths:
            self._texts = [_Text([source], config) for source in corpus.sources]
            for dataset, text in zip(here, self._texts, strict=True):
                sharing = tuple(path for path, other in enumerate(config.paths) if other == dataset)
                self._by_path |= dict.fromkeys(sharing, (text, sharing))
        self.num_windows = sum(text.num_windows for text in self._texts)
        """Samples in an epoch, of all texts."""

    def tokens(self, index: int) -> npt.NDArray[np.int32]:
        """The token ids of microbatch `index` [microbatch_size, sequence_length + 1]."""
        tokens: npt.NDArray[np.int32] = self.samples(index)[TOKENS].numpy()
        return tokens

    def weighted(self, weights: tuple[float, ...]) -> "Microbatches":
        """The microbatches of the same texts with other `data.weights`."""
        if weights not in self._weighted:
            corpus, config, paths = self._made_of
            self._weighted[weights] = Microbatches(corpus, dataclasses.replace(config, weights=weights), paths)
        return self._weighted[weights]

    def preparing(self, index: int) -> list[Future[Prepared]]:
        """The parts that microbatch `index` needs and that are not prepared yet. Has them, and those that come next,
        prepared in the background. The parts of the present epoch and the one before it stay at hand."""
        text, samples = self._place(index)
        return text.preparing(samples)

    def samples(self, index: int) -> dict[str, torch.Tensor]:
        """Microbatch `index` in its wire form (training/samples). Blocks while one of its parts is prepared.

        Sample j of microbatch i is sample i * microbatch_size + j of the text; epochs follow each other without a
        gap, so that a microbatch may begin in one and end in the next.
        """
        text, samples = self._place(index)
        return text.samples(samples)

    def _place(self, index: int) -> tuple["_Text", range]:
        """The text that a microbatch is of, and its samples there."""
        text, number = self._texts[0], index
        if self._by_path:
            text, sharing = self._by_path[index % self._num_paths]
            number = index // self._num_paths * len(sharing) + sharing.index(index % self._num_paths)
        return text, range(number * self._microbatch_size, (number + 1) * self._microbatch_size)

    def held_out(self, num_samples: int) -> list[dict[str, torch.Tensor]]:
        return [batch for source in self.held_out_by_source(num_samples) for batch in source.batches]

    def held_out_by_source(self, num_samples: int) -> list[HeldOut]:
        """About `num_samples` sequences, the same number of each dataset, spread evenly over its held-out part.

        They are always the same ones. If a dataset has fewer, each of them is given once.
        """
        found = [held_out for text in self._texts for held_out in text.held_out(-(-num_samples // len(self._names)))]
        sharing = {id(text): paths for text, paths in self._by_path.values()}
        paths = [sharing[id(text)] for text in self._texts] if sharing else [()] * len(self._names)
        return [
            HeldOut(name=name, batches=batches, share=share, paths=own)
            for name, (batches, share), own in zip(self._names, found, paths, strict=True)
        ]


class Texts:
    """The texts that a run trains on one after another, as its amendments say. Each is opened once.

    A microbatch follows from the configuration of its round and from its index, which also says where in a later text
    the first one is: microbatches from an amendment's round on are those of a run that has always had the new text.
    """

    def __init__(
        self, first: Microbatches, config: DataConfig, open_text: Callable[[DataConfig], Microbatches] | None = None
    ) -> None:
        """`config` is that of the `first` text. `open_text` opens another one; it runs in a thread of its own, and may
        raise ValueError, OSError and SwarmErrors. Without it there is no other."""
        self._open, self._first = open_text, first
        self._opened: dict[str, Future[Microbatches]] = {config.digest: Future()}
        self._opened[config.digest].set_result(first)

    def want(self, config: DataConfig) -> Future[Microbatches]:
        """The text of a configuration, whatever its weights. If it is not open yet, it is opened in the background. The
        future's error is a CorpusMismatch if this machine does not have that text."""
        opened = self._opened.get(config.digest)
        # What was not here before may be here now.
        if opened is None or (opened.done() and opened.exception() is not None):
            opened = self._opened[config.digest] = begun(partial(self._other, config), "text")
        return opened

    def _other(self, config: DataConfig) -> Microbatches:
        assert self._open is not None, "no amendment names another text"
        try:
            return self._open(config)
        except (ValueError, OSError, SwarmError) as error:
            raise CorpusMismatch(
                f"the run goes on with another text, {', '.join(config.source_names)}, which is not here: {error}"
            ) from None

    def at(self, config: DataConfig) -> Microbatches:
        """The microbatches of a configuration, whose text is open. Raises CorpusMismatch if it could not be opened."""
        return self.want(config).result().weighted(config.weights)

    def at_hand(self, config: DataConfig) -> Microbatches:
        """The text of a configuration, or the first one while that is not open."""
        opened = self._opened.get(config.digest)
        return self._first if opened is None or not opened.done() or opened.exception() else opened.result()


class _Text:
    def __init__(self, sources: Sequence[SourceTokens], config: DataConfig) -> None:
        self._sources = sources
        self._sequence_length = config.sequence_length
        self._microbatch_size = config.microbatch_size
        self._seed = config.seed
        self._num_sequences = [self._count(source.training) for source in sources]
        sizes = _part_sizes if config.part_rows else _epoch_sizes
        self._sizes = sizes(self._num_sequences, config.weights)
        """Samples of each dataset in an epoch."""
        self._ends = np.cumsum(self._sizes)
        self.num_windows = int(self._ends[-1])
        """Samples in an epoch."""

    def preparing(self, samples: range) -> list[Future[Prepared]]:
        epochs = range(samples[0] // self.num_windows, samples[-1] // self.num_windows + 1)
        parts = [source.parts for source in self._sources if source.parts is not None]
        wanted = [each.want(epoch) for epoch in epochs for each in parts]
        return [part for part in wanted if not part.done()]

    def samples(self, samples: range) -> dict[str, torch.Tensor]:
        epochs, positions = np.divmod(np.array(samples, dtype=np.uint64), np.uint64(self.num_windows))
        places = _permute(positions, self.num_windows, seed=self._seed, epochs=epochs)
        return self._gather(map(self._training_sequence, epochs.tolist(), places.tolist()))

    def held_out(self, num_samples: int) -> list[tuple[list[dict[str, torch.Tensor]], float]]:
        """Of each dataset the batches and the share, as HeldOut has them."""
        return [self._held_out_of(source.held_out, num_samples) for source in self._sources]

    def _held_out_of(self, part: _Part, num_samples: int) -> tuple[list[dict[str, torch.Tensor]], float]:
        available = self._count(part)
        num_samples = min(num_samples, available)
        numbers = [number * available // num_samples for number in range(num_samples)]
        size = self._microbatch_size
        batches = [
            self._gather((part, number) for number in numbers[first : first + size])
            for first in range(0, num_samples, size)
        ]
        return batches, available / num_samples

    def _training_sequence(self, epoch: int, place: int) -> tuple[_Part, int]:
        """Find the sequence at a place in an epoch's permutation: its dataset's training part, and its number there."""
        source = int(np.searchsorted(self._ends, place, side="right"))
        size = self._sizes[source]
        number = place - (int(self._ends[source]) - size)
        if (parts := self._sources[source].parts) is not None:
            part = parts.want(epoch).result().tokens
            if (available := self._count(part)) <= 0:
                # Hardly any of its rows could be used.
                part, available = self._sources[source].training, self._num_sequences[source]
            return part, number % available
        seen = epoch * size + number
        return self._sources[source].training, seen % self._num_sequences[source]

    def _count(self, part: _Part) -> int:
        return (len(part) - 1) // self._sequence_length if part.dtype.names is None else len(part)

    def _gather(self, sequences: Iterable[tuple[_Part, int]]) -> dict[str, torch.Tensor]:
        rows = [self._sequence(part, number) for part, number in sequences]
        return {name: torch.from_numpy(np.stack([row[name] for row in rows]).astype(np.int32)) for name in rows[0]}

    def _sequence(self, part: _Part, number: int) -> dict[str, _Part]:
        if part.dtype.names is None:
            start = number * self._sequence_length
            return {TOKENS: part[start : start + self._sequence_length + 1]}
        return {name: part[number][name] for name in part.dtype.names}


def _epoch_sizes(num_sequences: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Samples of each dataset in an epoch. All together there are about as many as there are sequences."""
    if not weights:
        return list(num_sequences)
    total = sum(num_sequences)
    return [max(1, round(total * (weight / sum(weights)))) for weight in weights]


def _part_sizes(num_sequences: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Samples of each dataset in an epoch: as many as there are, if they are not too many beside the others'."""
    if not weights:
        return list(num_sequences)
    scale = min(number / weight for number, weight in zip(num_sequences, weights, strict=True))
    return [max(1, int(weight * scale)) for weight in weights]


def _permute(positions: _Words, size: int, *, seed: int, epochs: _Words) -> _Words:
    """Each position's place in its epoch's permutation of range(size).

    A Feistel network permutes range(4**n), with the smallest n that makes this at least `size`. A position that lands
    outside range(size) is permuted again until it is inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
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
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): each bit of the input affects all output bits."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Losses on held-out text, in nats per target.

    Attributes:
        mean: over the held-out parts of all datasets, weighted by their lengths.
        by_source: the loss of each dataset, by its name.
    """

    mean: float
    by_source: Mapping[str, float]

    @property
    def of_several(self) -> Mapping[str, float]:
        """`by_source` if there are several datasets, else empty."""
        return self.by_source if len(self.by_source) > 1 else {}


def averaged(sources: Sequence[HeldOut], losses: Sequence[float]) -> HeldOutLoss:
    """The loss on all held-out text. `losses` has the mean loss over targets of each batch of each source, in order."""
    remaining = iter(losses)
    by_source, weights = dict[str, float](), list[float]()
    for source in sources:
        targets = [samples.amount(batch).targets for batch in source.batches]
        by_source[source.name] = float(np.average([next(remaining) for _ in targets], weights=targets))
        weights.append(source.share * sum(targets))
    return HeldOutLoss(mean=float(np.average(list(by_source.values()), weights=weights)), by_source=by_source)
