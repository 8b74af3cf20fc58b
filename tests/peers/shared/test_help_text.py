"""What --help says above its boxes is no wider than the terminal."""

import sys

import pytest

from peers import commands
from peers.shared.help_text import fitted


@pytest.mark.parametrize("words", ["peer", "keys", "keys issue", "model export"])
def test_no_program_s_help_is_wider_than_the_terminal(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *command = words.split()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "argv", [f"swarm-{program}", *command, "--help"])
    with pytest.raises(SystemExit) as end:
        getattr(commands, program)()
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) > 5
    assert [line for line in said.splitlines() if len(line) > 60] == []


def test_paragraphs_are_filled_and_indented_lines_stay_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "a paragraph of\ntwo lines and more\n\n    swarm-x one\n    swarm-x two and three\nthe end\n"
    assert fitted(text).splitlines() == [
        "a paragraph of two", "lines and more", "", "    swarm-x one", "    swarm-x two and", "        three",
        "the end",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "1000")
    assert max(map(len, fitted("word " * 100).splitlines())) <= 120
