"""Rows: records with named fields, from JSONL and Parquet files or a Hugging Face dataset, one after another.

Used by data/sources. Each row knows its file and number, for error messages. Only a few rows are in memory at a time.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.config import DataConfig
from swarm.data import hub
from swarm.machine import json_file
from swarm.machine.extras import missing

logger = logging.getLogger(__name__)

HUGGING_FACE = "hf:"
"""The prefix of a Hugging Face dataset's name."""
LONGEST_ROW_BYTES = 16 << 20
"""The longest line of JSONL that is accepted, because a line has to be in memory."""
_BATCH_ROWS = 64


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        place: file and number, counted from 1, for error lines.
    """

    place: str
    values: Mapping[str, Any]

    def fault(self, reason: str) -> ValueError:
        """Make an error that says what is wrong with this row, and where it is."""
        return ValueError(f"{self.place}: {' '.join(reason.split())}")

    def text(self, field: str) -> str:
        """The text of a field. Raises ValueError, one line, if the field is missing or no text."""
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.fault(f"there is no text in {field!r}; the row has {', '.join(self.values) or 'no fields'}")
        return value


def has_rows(path: Path) -> bool:
    """Whether a file has rows, by its name."""
    return path.suffix.lower() in READERS


def of_file(path: Path) -> Iterator[Row]:
    """The rows of a file that has rows. Raises OSError, or ValueError (one line) for a row that cannot be read."""
    return READERS[path.suffix.lower()](path)


def of_hugging_face(dataset: str, config: DataConfig) -> Iterator[Row]:
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
        for number, values in enumerate(rows, start=1):
            yield Row(f"data.dataset {dataset!r}, row {number}", values)
    except Exception as error:  # noqa: BLE001 - the library raises many kinds, and as late as at the last row
        raise ValueError(f"cannot load data.dataset {dataset!r}: {hub.reason(error, f'datasets/{name}')}") from None


def _jsonl(path: Path) -> Iterator[Row]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(LONGEST_ROW_BYTES + 1):
            number += 1
            row = Row(f"{path}, row {number}", {})
            if len(line) > LONGEST_ROW_BYTES:
                raise row.fault(f"the line is longer than {LONGEST_ROW_BYTES >> 20} MiB")
            if not line.strip():
                continue
            try:
                values = json_file.parse(line)
            except ValueError as error:
                raise row.fault(f"the line cannot be read: {error}") from None
            if not isinstance(values, dict):
                raise row.fault("the line is no JSON object with fields")
            yield Row(row.place, values)


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
                    yield Row(f"{path}, row {number}", values)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {' '.join(str(error).split())}") from None


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
"""What reads the rows of files, by their ending."""
