"""Corpora: a dataset's text as one memory-mapped file of tokens.

Trainers and evaluation call `prepare`; the first peer publishes the digest, and every other one calls
`check_digest`. Never trains on what it holds out, and never depends on where the files lie: two machines with
the same files get the same tokens in the same order.

Documents (files, or rows of a Hugging Face dataset) stay whole, and each is followed by the tokenizer's
separator. Files are ordered by the hash of their path below their common folder, so that the corpus's end, which
is held out, is a fair sample of it. Only UTF-8 files without NUL characters count as text; others are skipped.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarm.config import DataConfig
from swarm.data import tokenizers
from swarm.data.tokenizers import TokenIds, Tokenizer
from swarm.errors import CorpusMismatch

logger = logging.getLogger(__name__)

_HUGGING_FACE = "hf:"
_STDLIB = "stdlib"
_NOT_STDLIB_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# The build's own settings: they differ between machines with the same Python.
_NOT_STDLIB_FILES = ("_sysconfigdata", "python-config")
_CACHE_VERSION = 1
_PREPARING, _LOCK = ".preparing-", "lock"
_LOCKED_SECONDS = 60.0
"""How long it may take until a folder that is new is locked."""
_PIECE_CHARACTERS = 2**18
"""Files are read and tokenized in pieces of whole lines, about this long: memory stays flat for a file of any size."""
_SAY_SECONDS = 10.0
"""Between two lines that say how far a long one is."""

_Document = Iterable[str]
"""The pieces of one document, in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A tokenized dataset."""

    tokens: TokenIds
    """Every token [num_tokens], memory-mapped and read-only."""
    num_training_tokens: int
    """Tokens before the held-out part."""
    vocab_size: int
    """The tokenizer's; every token is below it."""
    digest: str
    """SHA-256, in hexadecimal, of the tokenizer's identity, the token type and the tokens' bytes."""

    @property
    def training(self) -> TokenIds:
        """The part to train on [num_training_tokens]."""
        return self.tokens[: self.num_training_tokens]

    @property
    def held_out(self) -> TokenIds:
        """The part never trained on: the corpus's end."""
        return self.tokens[self.num_training_tokens :]


def prepare(config: DataConfig, *, cache_dir: Path) -> Corpus:
    """Tokenize the dataset into `cache_dir`, unless it is there already, and map it into memory.

    Local files are recognised by path, size and modification time; a Hugging Face dataset by its name alone.
    Several processes may call this at once: each writes a file of its own, and the last rename wins. What a process
    left that was killed meanwhile is removed.

    Raises:
        ValueError: one line, if the dataset or the tokenizer is missing, unreadable, empty, or too short for one
            microbatch in either part.
    """
    tokenizer = tokenizers.load(config.tokenizer)
    _sweep(cache_dir)
    try:
        source, documents = _open(config)
        key = hashlib.sha256(
            json.dumps([_CACHE_VERSION, config.dataset, config.max_tokens, tokenizer.identity, source]).encode()
        ).hexdigest()
        path = cache_dir / f"{key[:32]}.tokens"
        if not path.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            _write(path, documents(), tokenizer, config)
        tokens = np.memmap(path, dtype=tokenizers.token_dtype(tokenizer.vocab_size), mode="r")
        digest = _digest_path(path).read_text(encoding="ascii")
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot prepare data.dataset {config.dataset!r} in {cache_dir}: {reason}") from None
    num_training_tokens = len(tokens) - int(len(tokens) * config.held_out_fraction)
    _check_length(config, num_training_tokens, len(tokens) - num_training_tokens)
    return Corpus(
        tokens=tokens, num_training_tokens=num_training_tokens, vocab_size=tokenizer.vocab_size, digest=digest
    )


def check_digest(config: DataConfig, corpus: Corpus) -> None:
    """Raise CorpusMismatch if the run was started with other text than `corpus`. A run without a digest takes any."""
    if config.digest in ("", corpus.digest):
        return
    if config.dataset == _STDLIB:
        version = ".".join(map(str, sys.version_info[:3]))
        advice = f"use the Python that the run's first peer uses (this is {version}), or give the run a dataset"
    elif config.dataset.startswith(_HUGGING_FACE):
        advice = (
            "the dataset has changed: on the machine that is behind delete ~/.cache/swarm/corpora, or swarm/corpora in "
            "XDG_CACHE_HOME, which is made again"
        )
    else:
        advice = "copy the files and the tokenizer from a machine of the run"
    raise CorpusMismatch(
        f"data.dataset {config.dataset!r} is different text here ({corpus.digest[:12]}) "
        f"than in the run ({config.digest[:12]}); {advice}"
    )


def _open(config: DataConfig) -> tuple[list[Any], Callable[[], Iterator[_Document]]]:
    """What identifies the source on this machine, and how to read its documents."""
    if config.dataset.startswith(_HUGGING_FACE):
        return [config.hf_config, config.hf_split, config.hf_text_field], lambda: _hugging_face_rows(config)
    files = _in_corpus_order(_find_files(config.dataset))
    stats = [(str(path), path.stat()) for path in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats], lambda: (
        _pieces(path) for path in files if _is_text(path)
    )


def _find_files(dataset: str) -> list[Path]:
    if dataset == _STDLIB:
        found = _files_under(Path(sysconfig.get_path("stdlib")), skipped_folders=_NOT_STDLIB_TEXT)
        return [path for path in found if path.suffix == ".py" and not path.name.startswith(_NOT_STDLIB_FILES)]
    path = Path(os.path.expanduser(dataset)).absolute()  # Of an unknown user it leaves as it is what Path refuses.
    if path.is_dir():
        return _files_under(path)
    if path.is_file():
        return [path]
    if not glob.has_magic(dataset):
        raise ValueError(
            f"data.dataset {dataset!r} does not exist; give 'stdlib', a file, folder or glob of text, or 'hf:NAME'"
        )
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    return [match for match in matches if match.is_file()]


def _files_under(root: Path, *, skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped_folders]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def _in_corpus_order(files: list[Path]) -> list[Path]:
    if not files:
        return []
    root = os.path.commonpath([path.parent for path in files])

    def rank(path: Path) -> bytes:
        return hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()

    return sorted(files, key=rank)


def _is_text(path: Path) -> bool:
    try:
        return all("\0" not in piece for piece in _pieces(path))
    except UnicodeDecodeError:
        return False


def _pieces(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        while lines := file.readlines(_PIECE_CHARACTERS):
            yield "".join(lines)


def _hugging_face_rows(config: DataConfig) -> Iterator[_Document]:
    try:
        # The library is an extra, and slow to import.
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"data.dataset {config.dataset!r} needs an extra; in swarm's folder: "
            ".venv/bin/pip install -c constraints.txt -e '.[hf]'"
        ) from None
    name = config.dataset.removeprefix(_HUGGING_FACE)

    def rows() -> Iterator[Any]:
        try:
            yield from load_dataset(name, config.hf_config or None, split=config.hf_split, streaming=True)
        except Exception as error:  # noqa: BLE001 - the library raises many kinds, and as late as at the last row
            reason = " ".join(str(error).split())
            raise ValueError(f"cannot load data.dataset {config.dataset!r}: {reason}") from None

    for row in rows():
        if not isinstance(row.get(config.hf_text_field), str):
            raise ValueError(
                f"data.dataset {config.dataset!r} has no text in {config.hf_text_field!r}; "
                f"set data.hf_text_field to one of: {', '.join(row)}"
            )
        yield [row[config.hf_text_field]]


def _write(path: Path, documents: Iterator[_Document], tokenizer: Tokenizer, config: DataConfig) -> None:
    dtype = tokenizers.token_dtype(tokenizer.vocab_size)
    digest = hashlib.sha256(f"{tokenizer.identity}\n{dtype.str}\n".encode())
    remaining = most = config.max_tokens or sys.maxsize
    said_at = time.monotonic()
    with _own_folder(path.parent) as folder:
        written = folder / path.name
        with written.open("wb") as file:
            for ids in _encode(documents, tokenizer):
                data = ids[:remaining].tobytes()
                digest.update(data)
                file.write(data)
                remaining -= min(len(ids), remaining)
                if not remaining:
                    break
                if time.monotonic() - said_at >= _SAY_SECONDS:
                    said_at = time.monotonic()
                    end = f"of {most / 1e6:.1f}" if config.max_tokens else "so far; data.max_tokens would end it sooner"
                    logger.info(
                        "preparing %s: %.1f million tokens %s", config.dataset, (most - remaining) / 1e6, end
                    )  # fmt: skip
            # A file that lost its end in a power cut would pass for the whole corpus.
            file.flush()
            os.fsync(file.fileno())
            if not file.tell():
                raise ValueError(f"data.dataset {config.dataset!r} holds no text; give it files of UTF-8 text")
        _digest_path(written).write_text(digest.hexdigest(), encoding="ascii")
        # The digest first: who sees the tokens finds their digest too.
        _digest_path(written).replace(_digest_path(path))
        written.replace(path)


@contextlib.contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """A new folder, removed at the end. The lock, which ends with this process, keeps others' `_sweep` away."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=_PREPARING) as name:
        folder = Path(name)
        with (folder / _LOCK).open("wb") as lock:
            # A file system without locks gives none to those who sweep, either.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def _sweep(cache_dir: Path) -> None:
    """Remove what processes left that were killed while they prepared: folders that are not new, and not locked."""
    for folder in cache_dir.glob(f"{_PREPARING}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _LOCKED_SECONDS:
                with (folder / _LOCK).open("ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


def _encode(documents: Iterator[_Document], tokenizer: Tokenizer) -> Iterator[TokenIds]:
    for document in documents:
        yield from map(tokenizer.encode, document)
        yield tokenizer.separator


def _digest_path(tokens_path: Path) -> Path:
    return tokens_path.with_suffix(".sha256")


def _check_length(config: DataConfig, num_training: int, num_held_out: int) -> None:
    needed = config.tokens_per_microbatch + 1
    if min(num_training, num_held_out) < needed:
        raise ValueError(
            f"data.dataset {config.dataset!r} is too short: {num_training} tokens to train on and {num_held_out} "
            f"held out, where a microbatch needs {needed} in each; give more text, another "
            "data.held_out_fraction, or a smaller data.microbatch_size or data.sequence_length"
        )
