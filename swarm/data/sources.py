"""Sources: where a dataset's text comes from, document by document.

Used by data/corpora. A document is a text file, or a row of a Hugging Face dataset. Which files there are, and in what
order, data/text_files says. A file that holds no text is skipped, and the reason is kept for the log.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.config import DataConfig
from swarm.data import text_files

HUGGING_FACE = "hf:"
"""What the name of a Hugging Face dataset begins with."""

Document = Iterable[str]
"""The pieces of one document, in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """What a corpus is made of.

    Attributes:
        identity: what tells on this machine whether the source has changed.
        documents: reads them, and adds to `no_text` what it skips.
        unreadable: reason by path, of files that were skipped without being read.
        no_text: reason by path, of files that turned out to hold no text when they were read.
        num_files: the skipped ones are included.
    """

    identity: list[Any]
    documents: Callable[[], Iterator[Document]]
    unreadable: Mapping[str, str]
    no_text: dict[str, str]
    num_files: int


def open_source(config: DataConfig) -> Source:
    """What `data.dataset` names. Raises ValueError with one line if there is no such thing."""
    if config.dataset.startswith(HUGGING_FACE):
        return Source(
            identity=[config.hf_config, config.hf_split, config.hf_text_field],
            documents=lambda: _hugging_face_rows(config),
            unreadable={},
            no_text={},
            num_files=0,
        )
    found = text_files.find(config.dataset)
    stats = [(str(path), path.stat()) for path in found.files]
    no_text: dict[str, str] = {}
    return Source(
        identity=[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        documents=lambda: _texts(found.files, no_text),
        unreadable={_shown(path): reason for path, reason in found.unreadable.items()},
        no_text=no_text,
        num_files=len(found.files) + len(found.unreadable),
    )


def _texts(files: Iterable[Path], no_text: dict[str, str]) -> Iterator[Document]:
    for path in files:
        if reason := text_files.fault(path):
            no_text[_shown(path)] = reason
        else:
            yield text_files.pieces(path)


def _shown(path: Path) -> str:
    """A path as a line of the log can hold it, whatever bytes its name is made of."""
    return "".join(c if c.isprintable() else "?" for c in str(path))


def _hugging_face_rows(config: DataConfig) -> Iterator[Document]:
    try:
        # The library is an extra, and slow to import.
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"data.dataset {config.dataset!r} needs an extra; in swarm's folder: "
            ".venv/bin/pip install -c constraints.txt -e '.[hf]'"
        ) from None
    name = config.dataset.removeprefix(HUGGING_FACE)

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
