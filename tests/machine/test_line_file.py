"""Files of lines: what is on disk after kills and on full disks."""

from pathlib import Path

import pytest

from swarm.machine.line_file import LineFile
from tests.support.full_disk import FullDisk


def test_several_writers_append(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    one, other = LineFile(path, "words"), LineFile(path, "words")
    assert all([one.append("a"), other.append("b"), one.append("c")])
    assert path.read_text() == "a\nb\nc\n"


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


def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Is a directory"):
        LineFile(tmp_path, "words")
