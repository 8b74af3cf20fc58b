"""Rows: records with named fields, one after another, from JSONL and Parquet files, a Hugging Face dataset, or a class
of the user's own.

Each row knows its file and number, for error messages. Only a few rows are in memory at a time. One bad row never ends
a dataset: `Faults` leaves it out.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from swarm.config import DataConfig
from swarm.config.data import CLASS, HUGGING_FACE
from swarm.data import hub, text_files
from swarm.errors import in_one_line
from swarm.machine import json_file
from swarm.machine.extras import missing, own_class

logger = logging.getLogger(__name__)

LONGEST_ROW_BYTES = 16 << 20
"""The longest line of JSONL that is accepted, because a line has to be in memory."""
_BATCH_ROWS = 64
_MOST_REASON = 500
"""The most characters of what is wrong with a row, because a row may hold anything."""

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        place: file and number, counted from 1, for error lines.
        flaw: why the row could not be read, if it could not.
    """

    place: str
    values: Mapping[str, Any]
    flaw: str = ""

    def fault(self, reason: str) -> ValueError:
        return ValueError(f"{self.place}: {' '.join(reason.split())}")

    def text(self, field: str) -> str:
        """The text of a field. Raises ValueError, one line, if the field is missing or no text."""
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.fault(f"there is no text in {field!r}; the row has {', '.join(self.values) or 'no fields'}")
        return value


@dataclass
class Faults:
    """Leaves out those rows of one dataset that cannot be used, and counts them.

    Attributes:
        first: what is wrong with the first of them, and where it is.
        most_at_first: if so many rows at the beginning cannot be used, none will be: another dataset or setting is
            meant.
    """

    num_used: int = 0
    num_rows: int = 0
    first: str = ""
    most_at_first: float = 100

    def each(self, rows: Iterable[Row], use: Callable[[Row], T]) -> Iterator[T]:
        """Yield what `use` makes of the rows, without those for which it raises ValueError. Raises ValueError, one line
        that names the first row, if none of many at the beginning can be used."""
        for row in rows:
            try:
                if row.flaw:
                    raise row.fault(row.flaw)
                used = use(row)
            except ValueError as error:
                self.num_rows += 1
                reason = str(error).removeprefix(f"{row.place}: ")[:_MOST_REASON]
                self.first = self.first or str(row.fault(reason))
                if self.num_rows == self.most_at_first and not self.num_used:
                    raise ValueError(self.first) from None
            else:
                self.num_used += 1
                yield used


def has_rows(path: Path) -> bool:
    return _kind(path) in READERS


def of_file(path: Path) -> Iterator[Row]:
    """The rows of a file that has rows. Raises OSError, or ValueError (one line) for a file that cannot be read."""
    return READERS[_kind(path)](path)


def _kind(path: Path) -> str:
    """The ending that says how a file is read. A compressed one is read as rows if it has lines."""
    ending, is_compressed = text_files.ending(path)
    return "" if is_compressed and READERS.get(ending) is not _jsonl else ending


def of_hugging_face(dataset: str, config: DataConfig, *, skipped: int = 0) -> Iterator[Row]:
    """The rows of `hf:NAME` or `hf:NAME:CONFIGURATION`, as they are downloaded. Raises ValueError with one line."""
    try:
        # Imported here, because the library is an extra, and slow to import.
        from datasets import load_dataset
    except ImportError:
        raise missing(dataset, "datasets", "hf") from None
    name, _, configuration = dataset.removeprefix(HUGGING_FACE).partition(":")
    # Without a network the library tries for half a minute.
    logger.info("asks Hugging Face for the dataset %s", name)
    try:
        rows = load_dataset(name, configuration or config.hf_config or None, split=config.hf_split, streaming=True)
        # In Parquet files the library skips rows without reading them.
        for number, values in enumerate(rows.skip(skipped) if skipped else rows, start=skipped + 1):
            yield Row(f"data.dataset {dataset!r}, row {number}", _without_nulls(values))
    except Exception as error:  # noqa: BLE001 - the library raises many kinds, and as late as at the last row
        raise ValueError(f"cannot load data.dataset {dataset!r}: {hub.reason(error, f'datasets/{name}')}") from None


def of_class(dataset: str, config: DataConfig) -> Iterator[Row]:
    """The rows of `class:package.module:Class`. Raises ValueError, one line, whatever the class does."""
    number = 0
    try:
        for number, values in enumerate(_imported(dataset)(), start=1):
            if isinstance(values, str):
                values = {config.text_field: values}
            is_row = isinstance(values, Mapping)
            place = f"data.dataset {dataset!r}, row {number}"
            yield Row(place, values if is_row else {}, "" if is_row else "it is neither a dict nor a string")
    except Exception as error:
        what = f"{type(error).__name__}: {in_one_line(error)}"
        raise ValueError(f"data.dataset {dataset!r} fails after row {number}: {what}") from error


def identity_of_class(dataset: str) -> list[Any]:
    """A value that changes with the class's file, and with its `identity`. Raises ValueError, one line."""
    found = _imported(dataset)
    identity = [str(getattr(found, "identity", ""))]
    try:
        stat = Path(inspect.getfile(found)).stat()
    except (TypeError, OSError):
        return identity  # It has no file of its own.
    return [*identity, stat.st_size, stat.st_mtime_ns]


def _imported(dataset: str) -> type:
    found = own_class("data.dataset", dataset.removeprefix(CLASS))
    if not (isinstance(found, type) and hasattr(found, "__iter__")):
        raise ValueError(f"data.dataset {dataset!r} is not a class with an __iter__ that gives rows")
    return found


def _jsonl(path: Path) -> Iterator[Row]:
    number = 0
    with text_files.opened(path) as file:
        while line := _line(file, path):
            number += 1
            place = f"{path}, row {number}"
            if len(line) > LONGEST_ROW_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_ROW_BYTES)
                yield Row(place, {}, f"the line is longer than {LONGEST_ROW_BYTES >> 20} MiB")
                continue
            if not line.strip():
                continue
            try:
                values = json_file.parse(line)
            except ValueError as error:
                yield Row(place, {}, f"the line cannot be read: {error}")
                continue
            is_object = isinstance(values, dict)
            yield Row(place, values if is_object else {}, "" if is_object else "the line is no JSON object with fields")


def _line(file: BinaryIO, path: Path) -> bytes:
    try:
        return file.readline(LONGEST_ROW_BYTES + 1)
    except text_files.DAMAGED as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing(str(path), "pyarrow", "parquet") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", _without_nulls(values))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {' '.join(str(error).split())}") from None


def _without_nulls(value: Any) -> Any:
    """The value without empty fields. A table's records have all fields that any of them has, and most are null."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
"""What reads the rows of files, by their ending."""
