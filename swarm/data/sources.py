"""Sources: read one dataset, text by text or row by row.

A text is a file, or a field of a row. data/text_files finds the files and their order. A file that holds no text, or no
rows, is skipped, and the reason is kept for the log. Of a Hugging Face dataset a source may be a part (data/parts).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarm.config import DataConfig
from swarm.config.data import CLASS, HUGGING_FACE
from swarm.data import rows, text_files
from swarm.data.rows import Faults, Row
from swarm.training.samples import TokenIds, token_dtype

DUMMY = "dummy"
_NUM_TOKENS = 1 << 22
_PIECE_TOKENS = 1 << 20
Text = Iterable[str]
"""The pieces of one text, in order."""


def random_tokens(vocab_size: int) -> Iterator[TokenIds]:
    """Yield pieces of tokens that are uniform and independent."""
    # numpy promises that this generator gives the same numbers in every release. It does not promise this for newer
    # generators.
    generator = np.random.RandomState(0)
    for _ in range(_NUM_TOKENS // _PIECE_TOKENS):
        yield generator.randint(0, vocab_size, _PIECE_TOKENS, dtype=token_dtype(vocab_size).type)


@dataclass(frozen=True, eq=False)
class Part:
    """Some successive rows of a Hugging Face dataset.

    Attributes:
        name: tells it from the dataset's other parts.
        rows: its rows. They are read once, and only if they are needed.
        may_be_empty: whether it may have no row that can be used.
    """

    name: str
    rows: Iterable[Row]
    may_be_empty: bool = False


class Source:
    """The files of a dataset, or its name on the hub, or a part of that.

    Attributes:
        dataset: the dataset's name in `data.dataset`.
        title: that name, and which part it is, for log lines.
        identity: a value that changes on this machine when the source has changed.
        unreadable: files that were skipped because they cannot be opened: the reason by path.
        no_text: files that were skipped because they turned out to hold no text, or no rows: the reason by path.
        num_files: the number of files, skipped ones included.
        faults: leaves out rows that cannot be used.
    """

    def __init__(self, dataset: str, config: DataConfig, part: Part | None = None) -> None:
        """Find the dataset's files. Raises ValueError, one line, if there is no such file, folder or glob."""
        self.dataset = dataset
        self.title = dataset if part is None else f"{dataset}, {part.name}"
        self.part = part
        self._config = config
        self._files: list[Path] = []
        self.unreadable: dict[str, str] = {}
        self.no_text: dict[str, str] = {}
        self.faults = Faults()
        if part is not None and part.may_be_empty:
            self.faults.most_at_first = math.inf
        self.identity: list[Any] = [config.hf_config, config.hf_split, config.text_field]
        if part is not None:
            self.identity += [config.part_rows, config.held_out_rows]
        if dataset.startswith(CLASS):
            self.identity += rows.identity_of_class(dataset)
        elif not dataset.startswith(HUGGING_FACE) and dataset != DUMMY:
            found = text_files.find(dataset)
            self._files = found.files
            self.unreadable = {_shown(path): reason for path, reason in found.unreadable.items()}
            stats = [(str(path), path.stat()) for path in found.files]
            self.identity = [config.text_field, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)]
        self.num_files = len(self._files) + len(self.unreadable)

    def texts(self) -> Iterator[Text]:
        """Yield the texts, file by file, and add skipped files to `no_text`. Raises ValueError, one line."""
        yield from self.faults.each(self._rows_without_files(), self._text_of)
        for path in self._files:
            if rows.has_rows(path):
                yield from self.faults.each(rows.of_file(path), self._text_of)
            elif reason := text_files.fault(path):
                self.no_text[_shown(path)] = reason
            else:
                yield text_files.pieces(path)

    def rows(self) -> Iterator[Row]:
        """Yield the rows, file by file, and add files without rows to `no_text`. Raises ValueError, one line."""
        yield from self._rows_without_files()
        for path in self._files:
            if rows.has_rows(path):
                yield from rows.of_file(path)
            else:
                self.no_text[_shown(path)] = f"it ends in none of {', '.join(rows.READERS)}"

    def _rows_without_files(self) -> Iterable[Row]:
        if self.part is not None:
            return self.part.rows
        if self.dataset.startswith(HUGGING_FACE):
            return rows.of_hugging_face(self.dataset, self._config)
        return rows.of_class(self.dataset, self._config) if self.dataset.startswith(CLASS) else ()

    def _text_of(self, row: Row) -> Text:
        text = row.values.get(self._config.text_field)
        if not isinstance(text, str):
            raise row.fault(
                f"there is no text in {self._config.text_field!r}; set data.text_field to one of: "
                f"{', '.join(row.values)}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise row.fault(f"the text in {self._config.text_field!r} has half a character, a lone surrogate") from None
        return [text]


def require_there(dataset: str) -> None:
    """Raise ValueError, one line, if a dataset names files and there are none. The hub's datasets are not checked."""
    if not dataset.startswith(HUGGING_FACE) and not text_files.find(dataset).files:
        raise ValueError(f"data.dataset {dataset!r} names no file that can be read")


def _shown(path: Path) -> str:
    """A path for log lines, with ? for characters that cannot be printed."""
    return "".join(c if c.isprintable() else "?" for c in str(path))
