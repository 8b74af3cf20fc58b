"""Tokenizes a dataset into one file in the user's cache, which is memory-mapped.

The result does not depend on where the dataset's own files are: two machines with the same files get the same tokens in
the same order. Texts (data/sources) stay whole, and the tokenizer's separator follows each of them. Conversations and
completions (data/documents) have targets, and are put side by side. The log names what is skipped. Nothing is in memory
as a whole.
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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.config import DataConfig
from swarm.data.chat import ChatTemplate
from swarm.data.documents import VERSION, Documents, noun_of, record_dtype, sequences
from swarm.data.sources import DUMMY, Part, Source, Text, random_tokens
from swarm.data.tokenizers import Tokenizer
from swarm.errors import in_one_line
from swarm.machine.words import counted
from swarm.training.samples import TARGETS, TokenIds, token_dtype

logger = logging.getLogger(__name__)

_PREPARING, _LOCK = ".preparing-", "lock"
_LOCKED_SECONDS = 60.0
"""A process locks its new folder within this time, so an older one without a lock was left by a dead process."""
_MOST_NAMED = 20
"""The most skipped files that the log names. Of further ones it gives only the number."""
_SAY_SECONDS = 10.0
"""Time between two log lines that say how far a preparation is."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A dataset's tokens, or sequences, and their digest.

    Attributes:
        tokens: every token of a text [num_tokens], or the sequences [num_sequences] as data/documents has them;
            memory-mapped and read-only.
        digest: SHA-256, in hexadecimal, of the tokenizer's identity, the type of what is stored, and its bytes.
    """

    tokens: npt.NDArray[Any]
    digest: str


@dataclass(frozen=True, eq=False)
class Recipe:
    """How datasets become tokens, or sequences. `template` renders conversations; None for other formats."""

    config: DataConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @property
    def dtype(self) -> np.dtype[Any]:
        vocab_size = self.tokenizer.vocab_size
        if self.config.has_targets:
            return record_dtype(self.config, vocab_size)
        return token_dtype(vocab_size)

    def documents(self, source: Source) -> Documents | None:
        """Make the object that turns a dataset's rows into documents, and counts them. None for texts."""
        if not self.config.has_targets:
            return None
        return Documents(self.config, self.tokenizer, self.template, source.faults)

    def key(self, source: Source) -> str:
        config = self.config
        origin = [VERSION, source.dataset, config.max_tokens, self.tokenizer.identity, source.identity]
        if config.has_targets:
            identity = self.template.identity if self.template is not None else ""
            origin += [config.format, config.too_long, repr(self.dtype), identity]
        return hashlib.sha256(json.dumps(origin).encode()).hexdigest()


def prepare(
    dataset: str, recipe: Recipe, cache_dir: Path, *, field: str = "data.dataset", part: Part | None = None
) -> Prepared:
    """Tokenize a dataset, or a part, into a file in `cache_dir`, unless it is there, and map the file into memory.

    Local files are recognised by path, size and modification time; a Hugging Face dataset by its name alone.
    Of several processes that call this at once, one reads the dataset and the others wait. (If the file system has no
    locks, each writes a file of its own, and the last rename wins.) Files that killed processes left are removed.

    Args:
        field: the field of the configuration that names the dataset, for errors.

    Raises:
        ValueError: one line, if the dataset is missing, unreadable or empty, or a row lacks a field.
    """
    _sweep(cache_dir)
    try:
        source = Source(dataset, recipe.config, part)
        path = _path(source, recipe, cache_dir)
        if (opened := _opened(path, recipe)) is None:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _alone(path.with_suffix(".lock"), source.title):
                opened = _opened(path, recipe) or _write(path, source, recipe)
        tokens, about = opened
    except ValueError as error:
        raise ValueError(str(error).replace(f"data.dataset {dataset!r}", f"{field} {dataset!r}")) from None
    except OSError as error:
        raise ValueError(
            f"cannot prepare {field} {dataset!r} in {cache_dir}: {in_one_line(error)}; the environment's "
            "XDG_CACHE_HOME can name another place for prepared texts than ~/.cache"
        ) from None
    _say_skipped(source.title, {**source.unreadable, **about["no_text"]}, source.num_files)
    if about["faults"]["num_rows"]:
        logger.warning(
            "%s of %s left out; the first: %s", counted(about["faults"]["num_rows"], "row"), source.title,
            about["faults"]["first"],
        )  # fmt: skip
    if recipe.config.has_targets:
        _say_counts(source.title, recipe.config, about["counts"], len(tokens))
    return Prepared(tokens, about["digest"])


def delete_parts(dataset: str, recipe: Recipe, cache_dir: Path, *, but: Collection[str]) -> None:
    """Delete a dataset's prepared parts, but not those with these names. Whoever has one open can still read it."""
    anyone = _path(Source(dataset, recipe.config, Part("*", ())), recipe, cache_dir)
    kept = {anyone.name.replace("*", name) for name in but}
    for path in cache_dir.glob(anyone.name):
        if path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()
                _about_path(path).unlink()


def _path(source: Source, recipe: Recipe, cache_dir: Path) -> Path:
    part = "" if source.part is None else f"-{source.part.name}"
    return cache_dir / f"{recipe.key(source)[:32]}{part}.tokens"


def _say_skipped(dataset: str, skipped: Mapping[str, str], num_files: int) -> None:
    for path, reason in sorted(skipped.items())[:_MOST_NAMED]:
        logger.warning("skipped %s: %s", path, reason)
    if skipped:
        logger.warning("skipped %d of the %s of %s", len(skipped), counted(num_files, "file"), dataset)


def _say_counts(dataset: str, config: DataConfig, counts: Mapping[str, int], num_samples: int) -> None:
    what, length = noun_of(config.format), config.sequence_length
    taken, samples = counted(counts["taken"], what), counted(num_samples, "sample")
    logger.info("%s has %s in %s of %d tokens", dataset, taken, samples, length)
    for number, fate in (
        (counts["cut"], f"cut to {length + 1} tokens"),
        (counts["dropped"], f"left out, longer than {length + 1} tokens"),
        (counts["without_target"], f"left out, without a token to be learnt within {length + 1}"),
    ):
        if number:
            logger.warning("%s of %s %s", counted(number, what), dataset, fate)


def _opened(path: Path, recipe: Recipe) -> tuple[npt.NDArray[Any], Any] | None:
    """A prepared dataset's tokens, and what is known about them; None if it is not there as a whole. Another process
    may delete a part of a dataset at any time, and a power cut may empty the file about it."""
    try:
        # An empty file cannot be mapped.
        is_empty = path.stat().st_size == 0
        tokens = np.zeros(0, recipe.dtype) if is_empty else np.memmap(path, dtype=recipe.dtype, mode="r")
        return tokens, json.loads(_about_path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write(path: Path, source: Source, recipe: Recipe) -> tuple[npt.NDArray[Any], Any]:
    """Prepare a dataset. Returns what `_opened` does."""
    config, documents = recipe.config, recipe.documents(source)
    layout = recipe.dtype.str if documents is None else str(recipe.dtype.descr)
    digest = hashlib.sha256(f"{recipe.tokenizer.identity}\n{layout}\n".encode())
    remaining = most = config.max_tokens or sys.maxsize
    said_at = time.monotonic()
    with _own_folder(path.parent) as folder:
        written = folder / path.name
        with written.open("wb") as file:
            for piece in _pieces(source, recipe, documents):
                # data.max_tokens may cut a text, but no sequence.
                data = piece[:remaining] if documents is None else piece
                digest.update(data.tobytes())
                file.write(data.tobytes())
                remaining -= min(_num_tokens(piece), remaining)
                if not remaining:
                    break
                if time.monotonic() - said_at >= _SAY_SECONDS:
                    said_at = time.monotonic()
                    end = f"of {most / 1e6:.1f}" if config.max_tokens else "so far"
                    if not config.max_tokens and source.part is None:
                        end += "; data.max_tokens would end it sooner"
                    done = (most - remaining) / 1e6
                    logger.info("preparing %s: %.1f million tokens %s", source.title, done, end)
            # Without this, a power cut could leave a file without its end, which would pass for the whole dataset.
            file.flush()
            os.fsync(file.fileno())
            if not file.tell() and not (source.part and source.part.may_be_empty):
                raise ValueError(_nothing(source, documents))
        counts = {} if documents is None else dataclasses.asdict(documents.counts)
        faults = dataclasses.asdict(source.faults)
        about = {"digest": digest.hexdigest(), "no_text": source.no_text, "counts": counts, "faults": faults}
        _about_path(written).write_text(json.dumps(about), encoding="utf-8")
        # It is opened before others can see it, and so delete it.
        opened = _opened(written, recipe)
        assert opened is not None
        # The file about the tokens is renamed first, so that a process that finds the tokens finds it too.
        _about_path(written).replace(_about_path(path))
        written.replace(path)
    return opened


def _nothing(source: Source, documents: Documents | None) -> str:
    """The message for a dataset that has no text, or no row, to learn from."""
    if source.faults.num_rows and not source.faults.num_used:
        return f"data.dataset {source.dataset!r} has no row that can be learnt: {source.faults.first}"
    if documents is None:
        return f"data.dataset {source.dataset!r} holds no text{_first_fault(source)}; give it files of UTF-8 text"
    counts = documents.counts
    if counts.dropped or counts.without_target:
        return (
            f"data.dataset {source.dataset!r} has nothing to learn: {counts.dropped} rows are longer than "
            f"data.sequence_length, and {counts.without_target} have no token to learn within it"
        )
    return f"data.dataset {source.dataset!r} has no rows{_first_fault(source)}; give it JSONL or Parquet files"


def _first_fault(source: Source) -> str:
    skipped = sorted({**source.unreadable, **source.no_text}.items())
    if not skipped:
        return ""
    path, reason = skipped[0]
    others = f", and {len(skipped) - 1} more were skipped" if len(skipped) > 1 else ""
    return f" ({path}: {reason}{others})"


@contextlib.contextmanager
def _alone(lock: Path, dataset: str) -> Iterator[None]:
    """Hold a lock for the block. A process that dies gives it back."""
    with lock.open("wb") as file:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("another process prepares %s: waiting until it is done", dataset)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
        # Whoever waits for this file finds the text, and does not need the lock.
        lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """Make a new folder for the `with` block. This process holds the folder's lock, so that no `_sweep` removes it."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=_PREPARING) as name:
        folder = Path(name)
        with (folder / _LOCK).open("wb") as lock:
            # Where the file system has no locks, `_sweep` gets none either, and removes nothing.
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


def _pieces(source: Source, recipe: Recipe, documents: Documents | None) -> Iterator[npt.NDArray[Any]]:
    """The pieces to store, in order: tokens [N] of a text, or single sequences."""
    if source.dataset == DUMMY:
        return random_tokens(recipe.tokenizer.vocab_size)
    if documents is None:
        return _encode(source.texts(), recipe.tokenizer)
    return sequences(documents.of(source.rows()), recipe.config, recipe.tokenizer.vocab_size)


def _num_tokens(piece: npt.NDArray[Any]) -> int:
    return len(piece) if piece.dtype.names is None else piece[TARGETS].size - 1


def _encode(texts: Iterator[Text], tokenizer: Tokenizer) -> Iterator[TokenIds]:
    for text in texts:
        yield tokenizer.prefix
        yield from map(tokenizer.encode, text)
        yield tokenizer.separator


def _about_path(tokens_path: Path) -> Path:
    """The path of the file with a dataset's digest, its skipped files and its counts."""
    return tokens_path.with_suffix(".json")
