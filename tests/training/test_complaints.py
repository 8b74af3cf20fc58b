"""What is written of complaints, and what is read of a text that others give."""

import json
from typing import Any

import pytest

from swarm.training.complaints import LONGEST_COMPLAINTS, LONGEST_LINE, MOST_NAMED, MOST_WORDS, Complaints, Named, Word

WORDS = tuple(Word("a", number, 0, 10, "its norm is odd") for number in (3, 2))
TOLD = Complaints(words=WORDS, named={"a": Named(3, "it lies"), "b": Named(2, "it accuses", accuses_falsely=True)})


def test_they_are_read_as_they_were_written() -> None:
    assert Complaints.read(TOLD.to_text()) == TOLD
    assert Complaints().to_text() == ""


def test_of_very_much_the_newest_is_said() -> None:
    words = tuple(Word(f"{number}", number, 0, 1, "x") for number in range(100))
    named = {f"{number}": Named(number, "x" * 1000) for number in range(100)}
    read = Complaints.read(Complaints(words=words, named=named).to_text())
    assert [word.round for word in read.words] == list(range(99, 99 - MOST_WORDS, -1))
    assert [each.round for each in read.named.values()] == list(range(99, 99 - MOST_NAMED, -1))
    assert {len(each.line) for each in read.named.values()} == {LONGEST_LINE}


def test_quotes_do_not_make_them_too_long_to_be_taken() -> None:
    words = tuple(Word("a" * 64, number, 0, 1, '"' * 200) for number in range(MOST_WORDS))
    named = {f"{number:064}": Named(number, '"' * 1000) for number in range(MOST_NAMED)}
    text = Complaints(words=words, named=named).to_text()
    assert len(text) <= LONGEST_COMPLAINTS
    assert len(Complaints.read(text).named) == MOST_NAMED


@pytest.mark.parametrize(
    "values",
    [
        {"words": []},
        {"words": [["a", 1, 0]], "named": {}},
        {"words": [["a", -1, 0, 1, "x"]], "named": {}},
        {"words": [["a", 1 << 60, 0, 1, "x"]], "named": {}},
        {"words": [["a", "1", 0, 1, "x"]], "named": {}},
        {"words": [["", 1, 0, 1, "x"]], "named": {}},
        {"words": [], "named": {"a" * 65: [1, "x", False]}},
        {"words": [], "named": {"a": [1, 7, False]}},
        {"words": 3, "named": {}},
        [],
    ],
)
def test_what_is_none_says_nothing(values: Any) -> None:
    assert Complaints.read(json.dumps(values)) == Complaints()
    for text in ("", "x", "[" * 9_000, '"' + "x" * (LONGEST_COMPLAINTS + 1) + '"'):
        assert Complaints.read(text) == Complaints()


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    read = Complaints.read(json.dumps({"words": [], "named": {"a": [1, "\x1b[2Jx", False]}}))
    assert "\x1b" not in read.named["a"].line
