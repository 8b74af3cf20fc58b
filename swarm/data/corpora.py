"""Corpora: the text that a run learns. It is one or several datasets, and a part of each is held out.

The first peer and the trainers call `prepare`. The first peer publishes the digests. The trainers put their datasets in
the run's order with `in_order`, and call `check_digest`. data/prepared prepares each dataset.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from swarm.config import DataConfig, TextSize
from swarm.config.data import HUGGING_FACE
from swarm.config.sizes import FEWEST_SAMPLES
from swarm.data import chat, prepared, text_files, tokenizers
from swarm.data.documents import longest_learnt
from swarm.data.parts import Parts
from swarm.data.prepared import Prepared, Recipe
from swarm.data.tokenizer_files import SERVED, TokenizerFiles
from swarm.errors import CorpusMismatch
from swarm.machine.words import counted


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceTokens:
    tokens: npt.NDArray[Any]
    """As data/prepared stores them."""
    num_training: int
    """The number of tokens, or sequences, that are trained on; they come first."""
    held_out: npt.NDArray[Any]
    """The part never trained on: the end of `tokens`, a dataset's first rows if it is read in parts, or the text that
    `data.validation` names."""
    digest: str
    """SHA-256, in hexadecimal, of the tokenizer's identity and all tokens, or sequences."""
    parts: Parts | None = None
    """With `data.part_rows` the dataset's parts, of which `tokens` is the first; otherwise None."""

    @property
    def training(self) -> npt.NDArray[Any]:
        return self.tokens[: self.num_training]


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    sources: Sequence[SourceTokens]
    """One for each of `data.datasets`, in their order."""
    vocab_size: int
    """The tokenizer's vocabulary size; every token is below it."""
    digest: str
    """SHA-256, in hexadecimal: of one dataset its own digest, of several the digest of their digests, or with
    `data.paths` of the digests of all paths' datasets. A corpus of only some paths' datasets has another one."""
    tokenizer_identity: str
    """Tokenizer.identity: see data/tokenizers."""

    @property
    def is_text(self) -> bool:
        """Whether its sources are streams of tokens, and not sequences with targets."""
        return self.sources[0].tokens.dtype.names is None


def prepare(config: DataConfig, *, cache_dir: Path) -> Corpus:
    """Tokenize all datasets into files in `cache_dir`, unless they are there, and map the files into memory. Of
    datasets that are read in parts this prepares the first part, and what is held out. Raises ValueError, of one line,
    if a dataset, the tokenizer or its chat template is missing, unreadable or empty, a row lacks a field, or a dataset
    is too short to be divided."""
    recipe = _recipe(config)
    sources = [_source(dataset, recipe, cache_dir) for dataset in config.datasets]
    return Corpus(
        sources=sources,
        vocab_size=recipe.tokenizer.vocab_size,
        digest=_digest(config, sources),
        tokenizer_identity=recipe.tokenizer.identity,
    )


def size(config: DataConfig, *, cache_dir: Path) -> TextSize:
    """The size of all datasets, or of their first parts, with what is held out. Raises ValueError as `prepare` does."""
    recipe, length = _recipe(config), config.sequence_length
    parts = [_tokens(dataset, recipe, cache_dir)[0].tokens for dataset in config.datasets]
    num_samples = sum(map(len, parts))
    if not config.has_targets:
        return TextSize(samples=num_samples, sample_tokens=1)
    # Only where there are few samples, or each document has one, it matters how long the documents are.
    if config.too_long == "drop" or (config.is_packed and num_samples >= FEWEST_SAMPLES):
        return TextSize(samples=num_samples, sample_tokens=length, longest=length)
    # A whole number of eights suits GPUs.
    longest = min(length, max(-(-longest_learnt(records) // 8) * 8 for records in parts))
    return TextSize(samples=num_samples, sample_tokens=length if config.is_packed else longest, longest=longest)


def _recipe(config: DataConfig) -> Recipe:
    template = chat.beside(config.tokenizer, now=lambda: chat.TRAINING_DATE) if config.has_conversations else None
    return Recipe(config, tokenizers.load(config.tokenizer), template)


def _tokens(dataset: str, recipe: Recipe, cache_dir: Path) -> tuple[Prepared, Prepared | None, Parts | None]:
    """A dataset, or its first part; what is held out of its beginning; and its parts."""
    config = recipe.config
    if not config.part_rows:
        return prepared.prepare(dataset, recipe, cache_dir), None, None
    parts = Parts(dataset, recipe, cache_dir)
    # What is held out are a dataset's first rows, so they are read first.
    held_out = None if config.validation else parts.held_out()
    return parts.first(), held_out, parts


def _source(dataset: str, recipe: Recipe, cache_dir: Path) -> SourceTokens:
    config = recipe.config
    found, held_out, parts = _tokens(dataset, recipe, cache_dir)
    if config.validation:
        held_out = prepared.prepare(config.validation, recipe, cache_dir, field="data.validation")
    return _divided(dataset, found, config) if held_out is None else _with_own(dataset, found, held_out, config, parts)


def _digest(config: DataConfig, sources: Sequence[SourceTokens]) -> str:
    """The digest of sources in the order of `config.datasets`, or of some of them."""
    digests = [source.digest for source in sources]
    if len(digests) == 1:
        return digests[0]
    if config.paths and len(digests) == len(config.datasets):
        # Which path takes which dataset belongs to what the run learns.
        by_name = dict(zip(config.datasets, digests, strict=True))
        digests = [by_name[dataset] for dataset in config.paths]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _divided(dataset: str, found: Prepared, config: DataConfig) -> SourceTokens:
    """Divide a dataset into its training part and its held-out part. Raises ValueError if one of them is too short."""
    tokens = found.tokens
    num_held_out = int(len(tokens) * config.held_out_fraction)
    # Of a short dataset that part would be less than a sample. An evaluation takes what there is, once.
    num_held_out = max(num_held_out, 1 if config.has_targets else min(config.sequence_length + 1, len(tokens) // 2))
    num_training = len(tokens) - num_held_out
    # With several datasets a microbatch has samples of all of them, so each needs only enough for one sample.
    what, num_samples = ("a microbatch", config.microbatch_size) if len(config.datasets) == 1 else ("a sample", 1)
    if config.has_targets and num_training < num_samples:
        raise ValueError(
            f"data.dataset {dataset!r} is too short: it makes {num_training} samples to train on and {num_held_out} "
            f"held out, and {num_samples} are needed to train on; give more, or a smaller data.microbatch_size or "
            "data.sequence_length"
        )
    needed, least = num_samples * config.sequence_length + 1, config.sequence_length + 1
    if not config.has_targets and (num_training < needed or num_held_out < least):
        raise ValueError(
            f"data.dataset {dataset!r} is too short: {num_training} tokens to train on and {num_held_out} held out, "
            f"where {what} needs {needed} to train on, and a sample {least} held out; give more text, another "
            "data.held_out_fraction, or a smaller data.microbatch_size or data.sequence_length"
        )
    return SourceTokens(tokens=tokens, num_training=num_training, held_out=tokens[num_training:], digest=found.digest)


def _with_own(
    dataset: str, found: Prepared, own: Prepared, config: DataConfig, parts: Parts | None
) -> SourceTokens:  # fmt: skip
    """Train on all of a dataset, or of its parts, and evaluate on another text. Raises ValueError if one of them is too
    short."""
    length = config.sequence_length
    named = f"data.dataset {dataset!r}"
    held_out = f"what is held out of {named} ({counted(config.held_out_rows, 'row')})"
    for name, part, num_samples in (
        (named if parts is None else f"part 0 of {named}", found.tokens, config.microbatch_size),
        (f"data.validation {config.validation!r}" if config.validation else held_out, own.tokens, 1),
    ):
        needed, unit = (num_samples, "samples") if config.has_targets else (num_samples * length + 1, "tokens")
        if len(part) < needed:
            raise ValueError(
                f"{name} is too short: it has {len(part)} {unit}, and {needed} are needed; give more, or a smaller "
                "data.microbatch_size or data.sequence_length"
            )
    digest = hashlib.sha256(f"{found.digest}\n{own.digest}\n".encode()).hexdigest()
    return SourceTokens(
        tokens=found.tokens, num_training=len(found.tokens), held_out=own.tokens, digest=digest, parts=parts
    )


def published(config: DataConfig, corpus: Corpus, files: TokenizerFiles | None) -> DataConfig:
    """Return `config` in the form that a run's first peer publishes, with digests by which others check that they have
    the same text. `files` are the tokenizer's files, which others get from the run's peers; None for bytes."""
    return dataclasses.replace(
        config,
        digest=corpus.digest,
        dataset_digests=tuple(source.digest for source in corpus.sources) if len(corpus.sources) > 1 else (),
        tokenizer=config.tokenizer if files is None else SERVED,
        tokenizer_identity=corpus.tokenizer_identity,
        tokenizer_files="" if files is None else files.digest,
    )


def digest_settings(config: DataConfig, *, cache_dir: Path) -> list[str]:
    """The settings that name this machine's text by its digests, for an amendment. Raises ValueError as `prepare`
    does."""
    named = published(config, prepare(config, cache_dir=cache_dir), None)
    return [f"data.{key}={json.dumps(getattr(named, key))}" for key in ("digest", "dataset_digests")]


def in_order(config: DataConfig, corpus: Corpus, paths: Collection[int] = ()) -> Corpus:
    """The corpus with its datasets in the run's order. It is unchanged if they are not the run's datasets, or those of
    the paths that this process runs."""
    left = {source.digest: source for source in corpus.sources}
    wanted = wanted_digests(config, paths)
    if sorted(wanted) != sorted(source.digest for source in corpus.sources):
        return corpus
    sources = [left[digest] for digest in wanted]
    return dataclasses.replace(corpus, sources=sources, digest=_digest(config, sources))


def wanted_digests(config: DataConfig, paths: Collection[int] = ()) -> tuple[str, ...]:
    """Those of `dataset_digests` that the datasets of some paths have; all if no path is named."""
    here = config.datasets_of(paths)
    known = zip(config.datasets, config.dataset_digests, strict=False)
    return tuple(digest for dataset, digest in known if dataset in here)


def check_digest(config: DataConfig, corpus: Corpus, wanted: Sequence[str] = ()) -> None:
    """Raise CorpusMismatch if the run was started with other text. A run without a digest takes any text. `wanted` are
    the digests of the datasets of some paths, if the corpus has only these."""
    if config.digest in ("", corpus.digest) or [*wanted] == [source.digest for source in corpus.sources]:
        return
    other = [
        dataset
        for dataset, source in zip(config.datasets, corpus.sources, strict=True)
        if source.digest not in config.dataset_digests
    ]
    names = ", ".join(map(repr, other or config.datasets))
    names += f" with data.validation {config.validation!r}" if config.validation else ""
    if any(map(text_files.is_stdlib, config.datasets)):
        version = ".".join(map(str, sys.version_info[:3]))
        advice = f"use the Python that the run's first peer uses (this is {version}), or give the run a dataset"
    elif any(dataset.startswith(HUGGING_FACE) for dataset in config.datasets):
        advice = (
            "the dataset has changed: on the machine that is behind delete ~/.cache/swarm/corpora, or swarm/corpora in "
            "XDG_CACHE_HOME, which is made again"
        )
    elif config.classes:
        advice = f"{config.classes[0]} has to give the rows that it gives on the run's other machines"
    else:
        advice = "copy the files from a machine of the run"
    raise CorpusMismatch(
        f"data.dataset {names} is different text here ({corpus.digest[:12]}) "
        f"than in the run ({config.digest[:12]}); {advice}"
    )
