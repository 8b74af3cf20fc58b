"""Text comes piece by piece, in whole characters, and ends where it should."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from swarm.data import tokenizers
from swarm.data.tokenizers import ByteTokenizer, JsonTokenizer
from swarm.generation.text_model import TextStream, Writing
from tests.support.tokenizers import write_chat_tokenizer, write_tokenizer


async def _stream(tokens: Iterable[int]) -> AsyncIterator[int]:
    for token in tokens:
        yield token


def test_characters_of_several_bytes_come_whole() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in "aé→🙂z".encode()]
    assert [piece for piece in pieces if piece] == ["a", "é", "→", "🙂", "z"]
    assert stream.rest() == ""


def test_half_a_character_at_the_end_is_left_out() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(byte) for byte in "a→".encode()[:-1]] == ["a", "", ""]
    assert stream.rest() == ""


def test_bytes_that_are_no_characters_hold_up_no_text() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in b"\xff" * 20 + "→".encode()]
    assert all(pieces[3:20])
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 20 + "→"


@pytest.mark.parametrize("end", [[0], []])
async def test_what_stands_before_half_a_character_is_said_at_the_end(end: list[int]) -> None:
    """Some tokens have whole characters and part of another."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))} | {"aÃ": 256}
    tokenizer = Tokenizer(BPE(vocabulary, [("a", "Ã")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    writing = Writing(_stream([256, *end]), JsonTokenizer(tokenizer.to_str()), end_tokens={0})
    assert "".join([piece async for piece in writing.pieces()]) == "a"


async def test_special_tokens_are_left_out_unless_they_are_wanted(tmp_path: Path) -> None:
    tokenizer = tokenizers.load(write_chat_tokenizer(tmp_path))
    tokens = tokenizer.encode("<|im_start|>a<|im_end|>b").tolist()
    for with_special, expected in ((False, "ab"), (True, "<|im_start|>a<|im_end|>b")):
        writing = Writing(_stream(tokens), tokenizer, with_special=with_special)
        assert "".join([piece async for piece in writing.pieces()]) == expected


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
