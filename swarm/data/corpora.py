"""Corpora: a dataset as one memory-mapped file: a text's tokens, or sequences of conversations or completions.

The first peer and the trainers call `prepare`. The first peer publishes the digest, and the trainers call
`check_digest`. A corpus does not depend on where the files lie: two machines with the same files get the same tokens in
the same order. Texts (data/sources) stay whole, and the tokenizer's separator follows each of them. Of
conversations and completions (data/documents) some tokens are targets, and data/packing puts them side by side. What is
skipped is told in the log. Nothing is in memory as a whole.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.config import DataConfig
from swarm.data import chat, packing, text_files, tokenizers
from swarm.data.documents import Documents
from swarm.data.rows import HUGGING_FACE
from swarm.data.sources import Source, Text
from swarm.data.tokenizer_files import SERVED, TokenizerFiles
from swarm.data.tokenizers import TokenIds, Tokenizer
from swarm.errors import CorpusMismatch, in_one_line
from swarm.training.samples import TARGETS

logger = logging.getLogger(__name__)

_CACHE_VERSION = 3
_PREPARING, _LOCK = ".preparing-", "lock"
_LOCKED_SECONDS = 60.0
"""A new folder is locked within this time."""
_MOST_NAMED = 20
"""So many skipped files are named in the log. Of the others only their number is told."""
_SAY_SECONDS = 10.0
"""Between two lines that say how far a long preparation is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A tokenized dataset."""

    tokens: npt.NDArray[Any]
    """Every token of a text [num_tokens], or the sequences [num_sequences] as data/packing has them; memory-mapped and
    read-only."""
    num_training: int
    """Tokens, or sequences, before the held-out part."""
    vocab_size: int
    """The tokenizer's; every token is below it."""
    digest: str
    """SHA-256, in hexadecimal, of the tokenizer's identity, the type of what is stored, and its bytes."""
    tokenizer_identity: str
    """See data/tokenizers."""

    @property
    def is_text(self) -> bool:
        """Whether it is one stream of tokens."""
        return self.tokens.dtype.names is None

    @property
    def training(self) -> npt.NDArray[Any]:
        """The part to train on [num_training]."""
        return self.tokens[: self.num_training]

    @property
    def held_out(self) -> npt.NDArray[Any]:
        """The part never trained on: the corpus's end."""
        return self.tokens[self.num_training :]


def prepare(config: DataConfig, *, cache_dir: Path) -> Corpus:
    """Make the dataset's tokens, or its sequences, in `cache_dir`, unless they are there, and map them into memory.

    Local files are recognised by path, size and modification time; a Hugging Face dataset by its name alone.
    Several processes may call this at once: each writes a file of its own, and the last rename wins. What killed
    processes left is removed.

    Raises:
        ValueError: one line, if the dataset, the tokenizer or its chat template is missing, unreadable or empty, a row
            lacks what it needs, or there is too little for both parts.
    """
    tokenizer = tokenizers.load(config.tokenizer)
    template = chat.beside(config.tokenizer, now=lambda: chat.TRAINING_DATE) if config.format == "chat" else None
    documents = Documents(config, tokenizer, template) if config.has_targets else None
    dtype: np.dtype[Any] = tokenizers.token_dtype(tokenizer.vocab_size)
    if documents is not None:
        dtype = packing.record_dtype(config, tokenizer.vocab_size)
    _sweep(cache_dir)
    try:
        source = Source(config)
        origin = [_CACHE_VERSION, config.dataset, config.max_tokens, tokenizer.identity, source.identity]
        if documents is not None:
            identity = template.identity if template is not None else ""
            origin += [config.format, config.too_long, repr(dtype), identity]
        key = hashlib.sha256(json.dumps(origin).encode()).hexdigest()
        path = cache_dir / f"{key[:32]}.tokens"
        if not path.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            _write(path, source, tokenizer, config, documents)
        tokens = np.memmap(path, dtype=dtype, mode="r")
        about = json.loads(_about_path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = in_one_line(error)
        raise ValueError(f"cannot prepare data.dataset {config.dataset!r} in {cache_dir}: {reason}") from None
    _say_skipped(config.dataset, {**source.unreadable, **about["no_text"]}, source.num_files)
    num_held_out = int(len(tokens) * config.held_out_fraction)
    if documents is not None:
        # Sequences are few where a text has many tokens.
        num_held_out = max(1, num_held_out)
        _say_counts(config, about["counts"], tokens)
    _check_length(config, len(tokens) - num_held_out, num_held_out)
    return Corpus(
        tokens=tokens,
        num_training=len(tokens) - num_held_out,
        vocab_size=tokenizer.vocab_size,
        digest=about["digest"],
        tokenizer_identity=tokenizer.identity,
    )


def published(config: DataConfig, corpus: Corpus, files: TokenizerFiles | None) -> DataConfig:
    """`config` as a run's first peer publishes it, so that others can tell whether they have the same text.

    Args:
        files: of the tokenizer, which others have from the run's peers; None for bytes.
    """
    return dataclasses.replace(
        config,
        digest=corpus.digest,
        tokenizer=config.tokenizer if files is None else SERVED,
        tokenizer_identity=corpus.tokenizer_identity,
        tokenizer_files="" if files is None else files.digest,
    )


def check_digest(config: DataConfig, corpus: Corpus) -> None:
    """Raise CorpusMismatch if the run was started with other text. A run without a digest takes any text."""
    if config.digest in ("", corpus.digest):
        return
    if config.dataset == text_files.STDLIB:
        version = ".".join(map(str, sys.version_info[:3]))
        advice = f"use the Python that the run's first peer uses (this is {version}), or give the run a dataset"
    elif config.dataset.startswith(HUGGING_FACE):
        advice = (
            "the dataset has changed: on the machine that is behind delete ~/.cache/swarm/corpora, or swarm/corpora in "
            "XDG_CACHE_HOME, which is made again"
        )
    else:
        advice = "copy the files from a machine of the run"
    raise CorpusMismatch(
        f"data.dataset {config.dataset!r} is different text here ({corpus.digest[:12]}) "
        f"than in the run ({config.digest[:12]}); {advice}"
    )


def _say_skipped(dataset: str, skipped: Mapping[str, str], num_files: int) -> None:
    for path, reason in sorted(skipped.items())[:_MOST_NAMED]:
        logger.warning("skipped %s: %s", path, reason)
    if skipped:
        logger.warning("skipped %d of the %d files of %s", len(skipped), num_files, dataset)


def _say_counts(config: DataConfig, counts: Mapping[str, int], sequences: npt.NDArray[Any]) -> None:
    """What became of rows; a warning where some are not learnt as they are."""
    what, length = "conversations" if config.format == "chat" else "completions", config.sequence_length
    logger.info(
        "%s has %d %s in %d samples of %d tokens", config.dataset, counts["taken"], what, len(sequences), length
    )
    for number, fate in (
        (counts["cut"], f"were cut to {length + 1} tokens"),
        (counts["dropped"], f"are left out: they have more than {length + 1} tokens"),
        (counts["without_target"], f"are left out: no token of theirs within {length + 1} is to be learnt"),
    ):
        if number:
            logger.warning("%d %s of %s %s", number, what, config.dataset, fate)


def _write(path: Path, source: Source, tokenizer: Tokenizer, config: DataConfig, documents: Documents | None) -> None:
    dtype = tokenizers.token_dtype(tokenizer.vocab_size)
    layout = dtype.str if documents is None else str(packing.record_dtype(config, tokenizer.vocab_size).descr)
    digest = hashlib.sha256(f"{tokenizer.identity}\n{layout}\n".encode())
    remaining = most = config.max_tokens or sys.maxsize
    said_at = time.monotonic()
    with _own_folder(path.parent) as folder:
        written = folder / path.name
        with written.open("wb") as file:
            for piece in _pieces(source, tokenizer, config, documents):
                # Of sequences none is cut.
                data = piece[:remaining] if documents is None else piece
                digest.update(data.tobytes())
                file.write(data.tobytes())
                remaining -= min(_num_tokens(piece), remaining)
                if not remaining:
                    break
                if time.monotonic() - said_at >= _SAY_SECONDS:
                    said_at = time.monotonic()
                    end = f"of {most / 1e6:.1f}" if config.max_tokens else "so far; data.max_tokens would end it sooner"
                    done = (most - remaining) / 1e6
                    logger.info("preparing %s: %.1f million tokens %s", config.dataset, done, end)
            # A file that lost its end in a power cut would pass for the whole corpus.
            file.flush()
            os.fsync(file.fileno())
            if not file.tell():
                raise ValueError(_nothing(config, source, documents))
        counts = {} if documents is None else dataclasses.asdict(documents.counts)
        about = {"digest": digest.hexdigest(), "no_text": source.no_text, "counts": counts}
        _about_path(written).write_text(json.dumps(about), encoding="utf-8")
        # This file first: a process that sees the tokens finds it too.
        _about_path(written).replace(_about_path(path))
        written.replace(path)


def _nothing(config: DataConfig, source: Source, documents: Documents | None) -> str:
    """What is wrong with a dataset of which nothing is left."""
    if documents is None:
        return f"data.dataset {config.dataset!r} holds no text{_first_fault(source)}; give it files of UTF-8 text"
    counts = documents.counts
    if counts.dropped or counts.without_target:
        return (
            f"data.dataset {config.dataset!r} has nothing to learn: {counts.dropped} rows are longer than "
            f"data.sequence_length, and {counts.without_target} have no token to learn within it"
        )
    return f"data.dataset {config.dataset!r} has no rows{_first_fault(source)}; give it JSONL or Parquet files"


def _first_fault(source: Source) -> str:
    skipped = sorted({**source.unreadable, **source.no_text}.items())
    if not skipped:
        return ""
    path, reason = skipped[0]
    others = f", and {len(skipped) - 1} more were skipped" if len(skipped) > 1 else ""
    return f" ({path}: {reason}{others})"


@contextlib.contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """A new folder, which is removed at the end. Others leave it alone while this process holds its lock."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=_PREPARING) as name:
        folder = Path(name)
        with (folder / _LOCK).open("wb") as lock:
            # A file system without locks gives none to `_sweep` either, which then removes nothing.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def _sweep(cache_dir: Path) -> None:
    """Remove what killed processes left: folders that are neither new nor locked."""
    for folder in cache_dir.glob(f"{_PREPARING}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _LOCKED_SECONDS:
                with (folder / _LOCK).open("ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


def _pieces(
    source: Source, tokenizer: Tokenizer, config: DataConfig, documents: Documents | None
) -> Iterator[npt.NDArray[Any]]:
    """What is stored, in order: tokens [N] of a text, or single sequences."""
    if documents is None:
        return _encode(source.texts(), tokenizer)
    return packing.sequences(documents.of(source.rows()), config, tokenizer.vocab_size)


def _num_tokens(piece: npt.NDArray[Any]) -> int:
    """Of a piece; of a sequence it is how many it can have."""
    return len(piece) if piece.dtype.names is None else piece[TARGETS].size - 1


def _encode(texts: Iterator[Text], tokenizer: Tokenizer) -> Iterator[TokenIds]:
    for text in texts:
        yield from map(tokenizer.encode, text)
        yield tokenizer.separator


def _about_path(tokens_path: Path) -> Path:
    """Path of the file that holds a corpus's digest, and says which files hold no text."""
    return tokens_path.with_suffix(".json")


def _check_length(config: DataConfig, num_training: int, num_held_out: int) -> None:
    if config.has_targets:
        if num_training < config.microbatch_size:
            raise ValueError(
                f"data.dataset {config.dataset!r} is too short: it makes {num_training} samples to train on and "
                f"{num_held_out} held out, and a microbatch has {config.microbatch_size}; give more, or a smaller "
                "data.microbatch_size or data.sequence_length"
            )
        return
    needed = config.tokens_per_microbatch + 1
    if min(num_training, num_held_out) < needed:
        raise ValueError(
            f"data.dataset {config.dataset!r} is too short: {num_training} tokens to train on and {num_held_out} "
            f"held out, where a microbatch needs {needed} in each; give more text, another "
            "data.held_out_fraction, or a smaller data.microbatch_size or data.sequence_length"
        )
