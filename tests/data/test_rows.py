import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from swarm.data import rows

VALUES = [{"text": f"line {number}", "id": number} for number in range(200)]


def _write(path: Path, values: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(values), path)
    else:
        content = ("\n".join(map(json.dumps, values)) + "\n").encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.parquet", "A.JSONL", "a.jsonl.gz"])
def test_rows_come_in_order_and_know_their_place(name: str, tmp_path: Path) -> None:
    path = _write(tmp_path / name, VALUES)
    assert rows.has_rows(path)
    found = list(rows.of_file(path))
    assert [row.values for row in found] == VALUES
    assert found[99].place == f"{path}, row 100"


def test_fields_that_a_table_adds_are_no_fields(tmp_path: Path) -> None:
    """In a Parquet file each record has the fields of all others, and null in them."""
    values: list[dict[str, Any]] = [{"call": {"city": "Bern"}}, {"call": {"count": 3}}]
    assert [row.values for row in rows.of_file(_write(tmp_path / "a.parquet", values))] == values


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "the line cannot be read: it is not valid JSON: Expecting property name"),
        (b'{"text": "\xff"}', "the line cannot be read: it is not UTF-8 text"),
        (b"[1]", "the line is no JSON object"),
        (b"[" * 100_000, "the line cannot be read: it is not valid JSON: it is nested too deeply"),
        (b'{"n": ' + b"1" * 5000 + b"}", "the line cannot be read: it has a number of more than 4,300 digits"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line)
    row = list(rows.of_file(path))[1]
    assert row.flaw.startswith(reason)
    assert "\n" not in row.flaw
    assert row.place == f"{path}, row 2"


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (3 << 20) + b'\n{"a": 1}\n')
    long, good = rows.of_file(path)
    assert (long.flaw, good.values) == ("the line is longer than 1 MiB", {"a": 1})
    assert good.place.endswith("row 2")
