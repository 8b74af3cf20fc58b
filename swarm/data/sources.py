"""Sources: where one dataset comes from, text by text or row by row.

Used by data/corpora. A text is a file, or what a field of a row says. Which files there are, and in what
order, data/text_files says. A file that holds nothing of use is skipped, and the reason is kept for the log.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swarm.config import DataConfig
from swarm.data import rows, text_files
from swarm.data.dummy import DUMMY
from swarm.data.rows import HUGGING_FACE, Row

Text = Iterable[str]
"""The pieces of one text, in order."""


class Source:
    """What a dataset is made of.

    Attributes:
        dataset: its name, of those in `data.dataset`.
        identity: what tells on this machine whether the source has changed.
        unreadable: reason by path, of files that were skipped without being read.
        no_text: reason by path, of files that turned out to hold nothing of use when they were read.
        num_files: the skipped ones are included.
    """

    def __init__(self, dataset: str, config: DataConfig) -> None:
        """Find what is named so. Raises ValueError with one line if there is no such thing."""
        self.dataset = dataset
        self._config = config
        self._files: list[Path] = []
        self.unreadable: dict[str, str] = {}
        self.no_text: dict[str, str] = {}
        self.identity: list[Any] = [config.hf_config, config.hf_split, config.text_field]
        if not self._is_hugging_face and dataset != DUMMY:
            found = text_files.find(dataset)
            self._files = found.files
            self.unreadable = {_shown(path): reason for path, reason in found.unreadable.items()}
            stats = [(str(path), path.stat()) for path in found.files]
            self.identity = [config.text_field, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)]
        self.num_files = len(self._files) + len(self.unreadable)

    @property
    def _is_hugging_face(self) -> bool:
        return self.dataset.startswith(HUGGING_FACE)

    def texts(self) -> Iterator[Text]:
        """The texts, file by file; adds to `no_text` what it skips. Raises ValueError with one line."""
        if self._is_hugging_face:
            yield from self._texts_of(rows.of_hugging_face(self.dataset, self._config))
        for path in self._files:
            if rows.has_rows(path):
                yield from self._texts_of(rows.of_file(path))
            elif reason := text_files.fault(path):
                self.no_text[_shown(path)] = reason
            else:
                yield text_files.pieces(path)

    def rows(self) -> Iterator[Row]:
        """The rows, file by file; adds to `no_text` the files that have none. Raises ValueError with one line."""
        if self._is_hugging_face:
            yield from rows.of_hugging_face(self.dataset, self._config)
        for path in self._files:
            if rows.has_rows(path):
                yield from rows.of_file(path)
            else:
                self.no_text[_shown(path)] = f"it ends in none of {', '.join((*rows.JSONL, *rows.PARQUET))}"

    def _texts_of(self, found: Iterator[Row]) -> Iterator[Text]:
        for row in found:
            text = row.values.get(self._config.text_field)
            if not isinstance(text, str):
                raise row.fault(
                    f"there is no text in {self._config.text_field!r}; set data.text_field to one of: "
                    f"{', '.join(row.values)}"
                )
            yield [text]


def require_there(dataset: str) -> None:
    """Raise ValueError, one line, if a dataset names files and there are none. Those of the hub are not asked for."""
    if not dataset.startswith(HUGGING_FACE) and not text_files.find(dataset).files:
        raise ValueError(f"data.dataset {dataset!r} names no file that can be read")


def _shown(path: Path) -> str:
    """A path as a line of the log can hold it, whatever bytes its name is made of."""
    return "".join(c if c.isprintable() else "?" for c in str(path))
