"""What --help says above its boxes is no wider than the terminal."""

import io
import re
import sys

import pytest

from peers import commands
from peers.shared.help_text import Told, fitted

HELPS = [
    "dashboard", "static", "generate", "doctor", "peer", "trainer", "status", "local", "keys", "keys new", "keys issue",
    "keys show", "model", "model import", "model export", "model show", "model push",
]  # fmt: skip


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("words", HELPS)
def test_no_program_s_help_is_wider_than_the_terminal(
    words: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *command = words.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", [f"swarm-{program}", *command, "--help"])
    with pytest.raises(SystemExit) as end:
        getattr(commands, program)()
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) > 5
    assert [line for line in said.splitlines() if len(line) > columns] == []


def test_paragraphs_are_filled_and_indented_lines_stay_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "a paragraph of\ntwo lines and more\n\n    swarm-x one\n    swarm-x two and three\nthe end\n"
    assert fitted(text).splitlines() == [
        "a paragraph of two",
        "lines and more",
        "",
        "    swarm-x one",
        "    swarm-x two and",
        "        three",
        "the end",
    ]
    monkeypatch.setenv("COLUMNS", "1000")
    assert max(map(len, fitted("word " * 100).splitlines())) <= 120


def test_what_takes_the_place_of_a_terminal_looks_like_one() -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    told = Told(Terminal(io.BytesIO(), encoding="utf-8"))
    print("hello", file=told)
    assert (told.isatty(), told.encoding, told.getvalue()) == (True, "utf-8", "hello\n")


def test_in_a_terminal_the_boxes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8", write_through=True))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "argv", ["swarm-doctor", "--help"])
    with pytest.raises(SystemExit):
        commands.doctor()
    head, *boxes = re.split(r"^(?=\u256d)", printed.getvalue().decode(), flags=re.MULTILINE)
    assert len(boxes) >= 2
    assert head.startswith("usage: swarm-doctor [-h] [OPTIONS] [INVITE]\n\nSay whether this machine")
    assert head.endswith(".\n\n")
