"""Tokenizers encode as transformers does, and end texts with the tokens that a model's files name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
from tokenizers import decoders, normalizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from swarm.config import DataConfig, ModelConfig
from swarm.data import tokenizers
from swarm.data.tokenizers import end_tokens
from swarm.errors import CorpusMismatch
from tests.support.tokenizers import write_tokenizer

WORDS = {"[UNK]": 0, "the": 1, "swarm": 2, "trains": 3}


def _write(path: Path, vocabulary: dict[str, int]) -> str:
    tokenizer = library.Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))
    return str(path)


def test_the_bytes_of_tokens_are_those_of_the_text_that_they_write(tmp_path: Path) -> None:
    """Also where a character has several tokens, or a decoder leaves out the space before the first word."""
    text = " the na\u00efve \U0001f41d"
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    like_gpt2 = library.Tokenizer(BPE(letters, []))
    like_gpt2.pre_tokenizer, like_gpt2.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    like_gpt2.add_special_tokens(["<|im_end|>"])
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581theniv", "<|im_end|>"]
    like_llama = library.Tokenizer(
        BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="n")
    )
    like_llama.normalizer = normalizers.Replace(" ", "\u2581")
    like_llama.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    like_llama.add_special_tokens(["<|im_end|>"])
    for tokenizer in (like_gpt2, like_llama):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        loaded = tokenizers.load(str(tmp_path))
        ids = loaded.encode(text + "<|im_end|>").tolist()
        assert b"".join(map(loaded.bytes_of, ids)).decode() == text + "<|im_end|>"
        assert loaded.bytes_of(ids[-1]) == b"<|im_end|>"
        assert loaded.bytes_of(100_000) == b""
    words = tokenizers.load(_write(tmp_path / "words.json", WORDS))
    assert b"".join(map(words.bytes_of, [1, 2])) == b" the swarm"
    assert [tokenizers.load("bytes").bytes_of(token) for token in (0xC3, 255, 256)] == [b"\xc3", b"\xff", b""]


def test_json_vocabulary_with_a_gap(tmp_path: Path) -> None:
    """The size follows the largest id, so that the embedding has a row for every token."""
    tokenizer = tokenizers.load(_write(tmp_path / "tokenizer.json", {**WORDS, "far": 299}))
    assert tokenizer.vocab_size == 300
    assert tokenizer.encode("far").dtype == np.uint16


def test_json_settings_for_batches_are_ignored(tmp_path: Path) -> None:
    """A tokenizer.json often carries a truncation and a padding, which would cut the corpus short."""
    tokenizer = library.Tokenizer.from_file(_write(tmp_path / "tokenizer.json", WORDS))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizers.load(str(tmp_path / "tokenizer.json")).encode("the swarm trains").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file or directory; give --tokenizer 'bytes', a folder"),
        (b"\xff\xfe", "cannot read .*not UTF-8 text; give --tokenizer 'bytes', a folder"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "is not a valid .*: Token `b` out of"),
    ],
)
def test_load_errors_are_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        tokenizers.load(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_names_its_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer's identity is compared before anything else."""
    path = _write(tmp_path / "tokenizer.json", WORDS)
    identity = tokenizers.load(path).identity
    for known in ("", identity):
        tokenizers.load_for_run(DataConfig(tokenizer=path, tokenizer_identity=known), vocab_size=4)
    other = DataConfig(tokenizer=path, tokenizer_identity="ab" * 32)
    for vocab_size in (3, 4):
        with pytest.raises(CorpusMismatch, match=rf"another tokenizer here \({identity[:12]}\) .* \(abababababab\); "):
            tokenizers.load_for_run(other, vocab_size=vocab_size)
    assert not caplog.messages


def test_the_model_has_all_tokens(caplog: pytest.LogCaptureFixture) -> None:
    data = DataConfig(tokenizer_identity="bytes")
    tokenizers.load_for_run(data, vocab_size=256)
    with pytest.raises(ValueError, match=r"model.vocab_size \(255\) is too small: .* at least 256"):
        tokenizers.load_for_run(data, vocab_size=255)
    tokenizers.load_for_run(data, vocab_size=1024)
    assert not caplog.messages
    tokenizers.load_for_run(data, vocab_size=32_000)
    assert caplog.messages[0].startswith("model.vocab_size is 32000, and the tokenizer has 256 tokens")


# -- what lies beside tokenizer.json -----------------------------------------------------------------------------------


def _save(folder: Path, about: dict[str, Any], *, single: str = "$A") -> str:
    """A tokenizer of bytes with <s>, </s> and <|plain|>, which tokenizer.json has as no special token."""
    names = [*sorted(ByteLevel.alphabet()), "<s>", "</s>", "<|plain|>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = library.Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    specials = [("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=specials)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **about}))
    return str(folder)


_IM_END = {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    "about",
    [
        {"eos_token": "<|im_end|>"},
        {"eos_token": {"__type": "AddedToken", **_IM_END}, "pad_token": "[PAD]"},
        {"added_tokens_decoder": {"259": _IM_END}},
        {"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]},
        {"eos_token": "<|plain|>"},
    ],
)
@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A </s>"])
def test_a_text_has_the_tokens_that_transformers_gives_it(about: dict[str, Any], single: str, tmp_path: Path) -> None:
    tokenizer = tokenizers.load(_save(tmp_path, about, single=single))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "a<|im_end|>b<|plain|> c</s><|im_start|>"
    expected = theirs.encode(text, add_special_tokens=True)
    ids = [*tokenizer.prefix.tolist(), *tokenizer.encode(text).tolist()]
    # What would end the text is left out: a prompt goes on.
    assert ids == (expected[:-1] if single.endswith("</s>") else expected)
    assert tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)


def test_a_text_ends_in_the_token_that_its_tokenizer_names(tmp_path: Path) -> None:
    """Usual names count where none is named."""
    named = tokenizers.load(_save(tmp_path / "named", {"eos_token": "<|im_end|>"}))
    usual = tokenizers.load(_save(tmp_path / "usual", {}))
    assert (named.decode(named.separator), usual.decode(usual.separator)) == ("<|im_end|>", "</s>")
    assert (named.end, usual.end) == (named.separator[0], usual.separator[0])
    assert named.identity != usual.identity, "they encode a text in different ways"


@pytest.mark.parametrize("names", [["vocab.json", "merges.txt"], ["tokenizer.model"]])
def test_a_tokenizer_in_older_files_is_not_read_as_bytes(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        ValueError, match=f"has its tokenizer in {' and '.join(names)}, and no tokenizer.json"
    ) as raised:
        tokenizers.load(str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"generation_config.json": {"eos_token_id": [1, 3]}}, {1, 3}),
        ({"generation_config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": "two"}}, {2}),
        (
            {"generation_config.json": {"eos_token_id": 1}, "tokenizer_config.json": {"eos_token": {"content": "two"}}},
            {1, 2},
        ),
        # "one two" is no token.
        ({"tokenizer_config.json": {"eos_token": "one two"}}, set()),
    ],
)
def test_they_are_named_in_several_places(files: dict[str, Any], expected: set[int], tmp_path: Path) -> None:
    tokenizer = tokenizers.load(write_tokenizer(tmp_path / "tokenizer.json", ["one", "two", "three"]))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert end_tokens(ModelConfig(), [tmp_path, tmp_path / "nowhere"], tokenizer) == expected


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "\x00", *(f'{{"eos_token_id": {value}}}' for value in ('"x"', "[null]", "true", "2.0", "[[2]]"))],
)
def test_what_makes_no_sense_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: (it is not|it holds no|eos_token_id is .* a token's number)"):
        end_tokens(ModelConfig(), [tmp_path], tokenizers.load("bytes"))


def test_a_text_ends_in_what_the_run_learns(tmp_path: Path) -> None:
    """Otherwise a model that learnt where its completions end would go on for ever."""
    write_tokenizer(tmp_path / "tokenizer.json", ["one", "</s>"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    tokenizer = tokenizers.load(str(tmp_path))
    assert tokenizer.end is not None
    assert tokenizer.end in end_tokens(ModelConfig(), [tmp_path], tokenizer)
    newline = ord("\n")
    plain = tokenizers.load("bytes")
    assert end_tokens(ModelConfig(), [], plain, format="completion") == {newline}
    assert end_tokens(ModelConfig(), [], plain, format="text") == set()
