"""JSON that anybody may have written."""

from pathlib import Path

import pytest

from swarm.machine import json_file
from swarm.machine.json_file import LineFile
from tests.support.full_disk import FullDisk

FAULTS = [
    (b"", "it is not valid JSON: Expecting value"), (b"{", "it is not valid JSON: Expecting property name"),
    (b"\xff", "it is not UTF-8 text"), (b"[" * 200_000, "it is not valid JSON: it is nested too deeply"),
    (b'{"a": ' + b"1" * 5000 + b"}", "it has a number of more than 4,300 digits"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "fault"), FAULTS)
def test_what_is_no_json_is_one_line(content: bytes, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{fault}"):
        json_file.parse(content)
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^cannot read {path}: {fault}") as raised:
        json_file.read_object(path, is_optional=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["[1]", "5", "null", '"a"'])
def test_what_holds_no_object_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: it holds no JSON object$"):
        json_file.read_object(path)


@pytest.mark.parametrize(("before", "after"), [("", "x\n"), ("whole\n", "whole\nx\n"), ("torn", "torn\nx\n")])
def test_a_line_that_its_writer_left_unfinished_is_left_alone(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "lines"
    path.write_text(before)
    LineFile(path, "words").append("x")
    assert path.read_text() == after


def test_a_full_disk_costs_lines_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines"
    disk = FullDisk(monkeypatch, room=8)
    file = LineFile(path, "words")
    assert [file.append(line) for line in ("first", "second", "third", "fourth")] == [True, False, False, False]
    disk.room = 100
    assert file.append("last")
    assert path.read_text() == "first\nse\nlast\n", "what is torn stays a line of its own"
    assert [record.getMessage() for record in caplog.records] == [f"words are not written to {path}: the disk is full"]
    disk.room = 0
    file.append("lost")
    assert caplog.records[-1].getMessage() == f"words are not written to {path}: No space left on device"
