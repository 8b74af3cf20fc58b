"""swarm-model route: decides offline which path each sequence of a text takes (DiPaCo, arXiv 2403.10616, section 2.4).

The sequences are read four times (two times for a random cut): to count them, for some that show what is alike or which
path suits them, to choose the path of each by its first tokens, and to write each into the shard of its path. So only a
number for each path is in memory of most. Shape suffixes: N sequences, C chosen ones, B beginnings of lines in these, P
paths, F features.
"""

import dataclasses
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peers.model.options import PROG, RouteModelOptions
from peers.shared import logs
from peers.shared.named_model import hidden_features
from peers.shared.process import cache_folder
from peers.shared.run_options import naming_options
from swarm import config as configs
from swarm.config import DataConfig, RunConfig
from swarm.data import path_router, tokenizers
from swarm.data.path_router import NUM_TOKENS, Features, PathRouter, path_names
from swarm.data.sources import Source
from swarm.data.tokenizers import Tokenizer
from swarm.errors import IntegrityError
from swarm.interchange import origin
from swarm.machine import extras
from swarm.machine.disk import require_new, whole_folder
from swarm.machine.words import counted

logger = logging.getLogger(__name__)

MOST_CLUSTERED, MOST_REFINED = 4096, 2048
"""The most sequences that make the clusters, and on which every path's loss is computed to refine the router."""
MORE_BEGINNINGS = 8
"""The lines of each of these, besides its first, whose beginnings the router learns to tell apart: it has so much more
to learn from."""
SAY_SECONDS = 10.0
_PREFIX_CHARACTERS = 1024
"""The beginning of a text in which its first tokens are."""
_MOST_CHARACTERS = 1 << 14
"""What is kept of each chosen sequence."""


def route(options: RouteModelOptions) -> None:
    """Make the folder of shards. Raises ValueError, IntegrityError, OSError, PeerUnavailable."""
    logs.setup_logging(PROG, "info")
    require_new(options.output)
    with naming_options(options):
        config = RunConfig() if options.config is None else configs.load(options.config)
        num_paths = options.paths or len(config.paths)
        variants = None
        if not options.paths:
            variants = [[block.variant for block in config.blocks_of(path)] for path in range(num_paths)]
        data = config.data
        if options.dataset:
            data = dataclasses.replace(data, paths=(), weights=(), dataset=options.dataset)
        tokenizer = tokenizers.load(options.tokenizer or data.tokenizer)
    if data.format != "text":
        raise ValueError(f"only texts are cut into shards, and data.format is {data.format!r}")
    if num_paths < 2:
        raise ValueError("the run has one path, which takes all of its text: see stages.variants")
    text = _Sequences(data, tokenizer, options.window)
    if options.random:
        scores = np.random.RandomState(options.seed % 2**32).random_sample((text.count(), num_paths))
        router, scores_NP = None, torch.from_numpy(scores)
    else:
        router, scores_NP = _learned(text, num_paths, options, variants)
    biases_P, paths_N = path_router.balanced(scores_NP, text.sizes, options.most_over_mean)
    if empty := sorted({*range(num_paths)} - set(paths_N.tolist())):
        raise ValueError(
            f"path {empty[0]} would get no text: many sequences begin alike, or are as large as a shard. Take fewer "
            f"paths, or a lower --most-over-mean than {options.most_over_mean:g}, or a smaller --window"
        )
    with whole_folder(options.output) as folder:
        text.write(folder, paths_N, num_paths)
        if router is not None:
            dataclasses.replace(router, biases_P=router.biases_P + biases_P).write(folder)
    _print_settings(options.output, num_paths, np.bincount(paths_N, np.array(text.sizes, dtype=np.float64), num_paths))


class _Sequences:
    """All sequences of a text, each time in the same order. Raises IntegrityError if there are more or fewer than were
    counted."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, most_characters: int) -> None:
        self._data = data
        self.tokenizer = tokenizer
        self._most_characters = most_characters
        self.sizes: list[int] = []
        """The characters of each, once they have been counted."""

    def __iter__(self) -> Iterator[str]:
        number, said_at = 0, time.monotonic()
        for dataset in self._data.datasets:
            source = Source(dataset, self._data)
            for sequence in path_router.sequences(source, self._most_characters):
                if number == len(self.sizes) > 0:
                    raise IntegrityError("the text grew while it was read: route it again")
                yield sequence
                number += 1
                if time.monotonic() - said_at >= SAY_SECONDS:
                    said_at = time.monotonic()
                    logger.info("%s so far", counted(number, "sequence"))
            if source.faults.num_rows and not self.sizes:  # Told once, while they are counted.
                left_out = counted(source.faults.num_rows, "row")
                logger.warning("%s of %s left out; the first: %s", left_out, dataset, source.faults.first)
        if number < len(self.sizes):
            raise IntegrityError("the text shrank while it was read: route it again")

    def count(self) -> int:
        logger.info("counting the sequences of the text")
        self.sizes = [len(sequence) for sequence in self]
        return len(self.sizes)

    def some(self, most: int, seed: int) -> dict[int, str]:
        """At most so many sequences that were counted, chosen at random, or how they begin: by their numbers."""
        wanted = set(np.random.RandomState(seed % 2**32).permutation(len(self.sizes))[:most].tolist())
        return {number: sequence[:_MOST_CHARACTERS] for number, sequence in enumerate(self) if number in wanted}

    def tokens(self, sequence: str, num_tokens: int | None = None) -> list[int]:
        """The first tokens of a sequence, or all of them, with those that the tokenizer puts before it."""
        end = None if num_tokens is None else max(_PREFIX_CHARACTERS, 16 * num_tokens)
        encoded = self.tokenizer.encode(sequence[:end])
        return [*map(int, self.tokenizer.prefix), *map(int, encoded)][:num_tokens]

    def write(self, folder: Path, paths_N: npt.NDArray[np.int64], num_paths: int) -> None:
        """Write each sequence into the file of its path. Raises OSError."""
        with ExitStack() as stack:
            opened = [(folder / name).open("w", encoding="utf-8") for name in path_names(num_paths, ".jsonl")]
            files = [stack.enter_context(file) for file in opened]
            for sequence, path in zip(self, paths_N.tolist(), strict=True):
                files[path].write(json.dumps({self._data.text_field: sequence}, ensure_ascii=False) + "\n")


def _learned(
    text: _Sequences, num_paths: int, options: RouteModelOptions, variants: Sequence[Sequence[int]] | None
) -> tuple[PathRouter, torch.Tensor]:
    """The router that some sequences' clusters, or losses, lead to, and the scores of all sequences. `variants` says
    through which of its stages' variants each path leads, if that is known."""
    extras.require("swarm-model route", "scikit-learn", "route", modules=["sklearn"])
    features: Features = path_router.hashed
    digest = ""
    if options.model is not None:
        features, digest = hidden_features(options.model, cache_folder(), logger.info)
    if (number := text.count()) < num_paths:
        raise ValueError(f"there are {number} sequences, too few for {num_paths} paths")
    if options.refine is not None:
        chosen = text.some(MOST_REFINED, options.seed)
        paths_C = _with_least_loss(text, [*chosen.values()], num_paths, options.refine)
    else:
        chosen = text.some(MOST_CLUSTERED, options.seed)
        paths_C = _clustered(text, chosen, features, num_paths, options, variants)
    generator = np.random.RandomState(options.seed % 2**32)
    beginnings = [_beginnings(sequence, generator) for sequence in chosen.values()]
    nums_C = np.array([len(each) for each in beginnings])
    logger.info(
        "fitting the router to %s of %s", counted(int(nums_C.sum()), "beginning"), counted(len(chosen), "sequence")
    )
    rows = _all_features([text.tokens(each, NUM_TOKENS) for each in chain.from_iterable(beginnings)], features)
    features_BF, mean_F, deviation_F = _evened(rows, options.model)
    # Sequences count alike, however many lines they have.
    counts_B = np.repeat(nums_C.mean() / nums_C, nums_C)
    weights_PF, biases_P = path_router.classified(features_BF, np.repeat(paths_C, nums_C), counts_B, num_paths)
    weights_PF = weights_PF / torch.from_numpy(deviation_F)
    biases_P = biases_P - (weights_PF * torch.from_numpy(mean_F)).sum(1)
    router = PathRouter(
        weights_PF=weights_PF, biases_P=biases_P, tokenizer=text.tokenizer.identity, model=options.model or "",
        model_digest=digest,
    )  # fmt: skip
    logger.info("choosing the path of each sequence")
    scores_NP = torch.empty(number, num_paths)
    for row_P, sequence in zip(scores_NP, text, strict=True):
        row_P.copy_(router.scores(features(text.tokens(sequence, NUM_TOKENS))))
    return router, scores_NP


def _beginnings(sequence: str, generator: np.random.RandomState) -> list[str]:
    """What begins where the sequence does, and with some of its lines."""
    last = len(sequence.rstrip())
    lines = [found.end() for found in re.finditer("\n", sequence) if found.end() < last]
    starts = (0, *generator.permutation(lines)[:MORE_BEGINNINGS])
    return [sequence[start : start + _PREFIX_CHARACTERS] for start in starts]


def _all_features(pieces: Sequence[Sequence[int]], features: Features) -> list[torch.Tensor]:
    """The features of each piece of tokens."""
    rows, said_at = list[torch.Tensor](), time.monotonic()
    for tokens in pieces:
        rows.append(features(tokens))
        if time.monotonic() - said_at >= SAY_SECONDS:
            said_at = time.monotonic()
            logger.info("features of %d of %d so far", len(rows), len(pieces))
    return rows


def _evened(rows: Sequence[torch.Tensor], model: str | None) -> tuple[npt.NDArray[np.float32], ...]:
    """Features of which each column has the same mean and deviation, and what these were. Those that no model has made
    stay as they are."""
    features_BF = torch.stack([*rows]).float().numpy()
    if model is None:
        return features_BF, np.zeros(1, dtype=np.float32), np.ones(1, dtype=np.float32)
    # Some columns of hidden states are much larger than all others.
    mean_F, deviation_F = features_BF.mean(0), features_BF.std(0) + np.float32(1e-6)
    return (features_BF - mean_F) / deviation_F, mean_F, deviation_F


def _clustered(
    text: _Sequences, chosen: Mapping[int, str], features: Features, num_paths: int, options: RouteModelOptions,
    variants: Sequence[Sequence[int]] | None,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """The path of each chosen sequence [C], so that those that are alike as a whole have the same one."""
    logger.info("clustering %s", counted(len(chosen), "sequence"))
    rows = _all_features([text.tokens(sequence) for sequence in chosen.values()], features)
    features_CF, *_ = _evened(rows, options.model)
    sizes_C = [text.sizes[number] for number in chosen]
    paths_C, centroids_PF = path_router.clustered(
        features_CF, sizes_C, num_paths, options.most_over_mean, seed=options.seed
    )
    if variants is None:
        return paths_C
    return np.argsort(path_router.arranged(centroids_PF, variants, seed=options.seed))[paths_C]


def _with_least_loss(
    text: _Sequences, sequences: Sequence[str], num_paths: int, folder: Path
) -> npt.NDArray[np.int64]:  # fmt: skip
    """The path with the least loss on each sequence [C]. Raises ValueError if a path's model is missing."""
    losses_PC = np.zeros((num_paths, len(sequences)))
    for path, name in enumerate(path_names(num_paths)):
        if not (folder / name).is_dir():
            raise ValueError(f"{folder} has no {name}: export the run's paths there with {PROG} export")
        logger.info("computing losses of %s along path %d", counted(len(sequences), "sequence"), path)
        losses_PC[path] = _losses(folder / name, text, sequences)
    told = f"{losses_PC.min(0).mean():.4f}, and along all paths {losses_PC.mean():.4f}"
    logger.info("mean loss of these sequences along each one's best path %s", told)
    paths_C: npt.NDArray[np.int64] = losses_PC.argmin(0)
    return paths_C


@torch.inference_mode()
def _losses(folder: Path, text: _Sequences, sequences: Sequence[str]) -> list[float]:
    """A model's loss on each sequence, in nats a token; 0 if it has a single token."""
    found = origin.from_folder(folder)
    model = origin.transformer(found, found.config, torch.device("cpu")).eval()
    rows = [text.tokens(sequence, found.config.data.sequence_length + 1) for sequence in sequences]
    return [float(model.loss(torch.tensor([row]))) if len(row) > 1 else 0.0 for row in rows]


def _print_settings(output: Path, num_paths: int, sizes_P: npt.NDArray[np.number[Any]]) -> None:
    largest = sizes_P.max() / sizes_P.mean()
    print(f"# {num_paths} shards of {sizes_P.sum():,.0f} characters; the largest has {largest:.2f} times the mean")
    print("[data]")
    print("paths = [")
    for name in path_names(num_paths, ".jsonl"):
        print(f"    {json.dumps(str(output / name))},")
    print("]")
