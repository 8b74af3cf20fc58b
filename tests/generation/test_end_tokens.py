"""The tokens that end a text are those that a model's files name."""

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.data import tokenizers
from swarm.generation.end_tokens import end_tokens
from tests.support.tokenizers import write_tokenizer


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config.json": {"eos_token_id": 2}}, {2}),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": [1, 3]}}, {1, 3}),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {}}, {2}),
        ({"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": "two"}}, {2}),
        ({"config.json": {"eos_token_id": 1}, "tokenizer_config.json": {"eos_token": {"content": "two"}}}, {1, 2}),
        # It is no token.
        ({"tokenizer_config.json": {"eos_token": "one two"}}, set()),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": [1]}, set()),
    ],
)
def test_they_are_named_in_several_places(files: dict[str, Any], expected: set[int], tmp_path: Path) -> None:
    tokenizer = tokenizers.load(write_tokenizer(tmp_path / "tokenizer.json", ["one", "two", "three"]))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert end_tokens([tmp_path, tmp_path / "nowhere"], tokenizer) == expected


@pytest.mark.parametrize("text", ["{", '{"eos_token_id": "x"}', '{"eos_token_id": [null]}', "\x00"])
def test_what_makes_no_sense_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is no JSON|eos_token_id must be a token's number"):
        end_tokens([tmp_path], tokenizers.load("bytes"))
