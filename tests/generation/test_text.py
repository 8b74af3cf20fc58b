"""Text comes piece by piece, in whole characters, and ends where it should."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from swarm.data import tokenizers
from swarm.data.tokenizers import ByteTokenizer
from swarm.generation.text import TextStream, Writing
from tests.support.tokenizers import write_tokenizer


async def _stream(tokens: Iterable[int]) -> AsyncIterator[int]:
    for token in tokens:
        yield token


def test_characters_of_several_bytes_come_whole() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in "aé→🙂z".encode()]
    assert [piece for piece in pieces if piece] == ["a", "é", "→", "🙂", "z"]
    assert stream.rest() == ""


def test_half_a_character_at_the_end_is_said_as_such() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(byte) for byte in "a→".encode()[:-1]] == ["a", "", ""]
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"


def test_spaces_between_words_are_kept(tmp_path: Path) -> None:
    tokenizer = tokenizers.load(write_tokenizer(tmp_path / "tokenizer.json", ["one", "two", "three"]))
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in (1, 2, 3, 1)] == ["one", " two", " three", " one"]


@pytest.mark.parametrize(
    ("text", "stops", "expected", "reason"),
    [
        ("one two three", (), "one two three", "length"),
        ("one two three", ("two",), "one ", "stop"),
        ("one two three", ("three", "e t"), "on", "stop"),
        ("ends with tw", ("two",), "ends with tw", "length"),
        ("ab abc abcd", ("abcd",), "ab abc ", "stop"),
        ("two", ("two",), "", "stop"),
        ("→→🙂", ("→🙂",), "→", "stop"),
    ],
)
async def test_it_stops_at_the_first_of_the_strings(
    text: str, stops: tuple[str, ...], expected: str, reason: str
) -> None:
    writing = Writing(_stream(text.encode()), ByteTokenizer(), stops=stops)
    pieces = [piece async for piece in writing.pieces()]
    assert "".join(pieces) == expected
    assert all(pieces)
    assert writing.finish_reason == reason


async def test_it_ends_with_an_end_token_which_counts() -> None:
    writing = Writing(_stream(b"one\0two"), ByteTokenizer(), end_tokens={0})
    assert "".join([piece async for piece in writing.pieces()]) == "one"
    assert (writing.num_tokens, writing.finish_reason) == (4, "stop")


async def test_nothing_that_may_begin_a_stop_is_said_too_early() -> None:
    writing = Writing(_stream(b"x<y<en<end>"), ByteTokenizer(), stops=("<end>",))
    assert [piece async for piece in writing.pieces()] == ["x", "<y", "<en"]
