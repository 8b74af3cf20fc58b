"""Which files hold text, and where it is cut into pieces."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.data import text_files

PIECE = 16


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", PIECE)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 4)


def _pieces(folder: Path, text: str) -> list[str]:
    path = folder / "text"
    path.write_bytes(text.encode())
    return list(text_files.pieces(path))


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_lines_stay_whole(tmp_path: Path, seed: int) -> None:
    """Tokens depend on where pieces end. As long as lines are short, pieces end where `readlines` ends them."""
    rng = random.Random(seed)
    lines = [
        "".join(rng.choices("ab \u4e2d", k=rng.randrange(PIECE - 2))) + rng.choice(["\n", "\r", "\r\n", "\n\n"])
        for _ in range(200)
    ]
    text = "".join(lines) + rng.choice(["", "no end"])
    given = _pieces(tmp_path, text)
    with (tmp_path / "text").open(encoding="utf-8", newline="") as file:
        expected = ["".join(whole) for whole in iter(lambda: file.readlines(PIECE), [])]
    assert given == expected


def test_a_long_line_is_cut_before_the_spaces_of_a_last_word(tmp_path: Path) -> None:
    text = "one two  three four five six   seven eight nine ten eleven twelve thirteen\nfourteen\n"
    given = _pieces(tmp_path, text)
    assert "".join(given) == text
    assert given == ["one two  three four five six", "   seven eight nine ten eleven", " twelve thirteen\nfourteen\n"]


@pytest.mark.parametrize("text", ["\u4e2d" * 100, " " * 100, "a" * 20 + " " * 100, "\u4e2d" * 40 + "\r\n" + "b" * 60])
def test_a_line_without_words_is_cut_by_its_length(tmp_path: Path, text: str) -> None:
    given = _pieces(tmp_path, text)
    assert "".join(given) == text
    assert max(map(len, given)) <= 3 * PIECE
    assert len(given) <= 1 + len(text) // PIECE
    if text.isalpha():
        assert [len(piece) for piece in given] == [32, 32, 32, 4]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ""),
        ("na\u00efve \u4e2d\u6587 \U0001f41d\r\n".encode(), ""),
        (b"0123456789\xff", "not UTF-8 at byte 10"),
        (b"012\xe4\xb8.", "not UTF-8 at byte 3"),
        (b"0123\xe4\xb8", "not UTF-8 at byte 4"),
        (b"0123456789\0123", "a NUL character at byte 10"),
        (b"\xed\xa0\x80", "not UTF-8 at byte 0"),
    ],
)
def test_what_is_wrong_with_a_file_and_where(tmp_path: Path, content: bytes, reason: str) -> None:
    """The fault is found even if a character lies across two chunks that are read."""
    path = tmp_path / "file"
    path.write_bytes(content.replace(b"\0123", b"\x00123"))
    assert text_files.fault(path) == reason


def test_files_that_cannot_be_opened_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("text")
    scandir = os.scandir

    def guarded(path: Any) -> Iterator[Any]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    found = text_files.find(str(tmp_path))
    assert set(found.files) == {tmp_path / "good.txt", tmp_path / "open" / "x.txt"}
    assert found.unreadable == {
        tmp_path / "link.txt": "No such file or directory",
        tmp_path / "pipe": "not a regular file",
        tmp_path / "closed": "Permission denied",
    }
