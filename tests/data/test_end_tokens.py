"""The tokens that end a text are those that a model's files name."""

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.config import ModelConfig
from swarm.data import tokenizers
from swarm.data.tokenizers import end_tokens
from tests.support.tokenizers import write_tokenizer


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"generation_config.json": {"eos_token_id": 2}}, {2}),
        ({"generation_config.json": {"eos_token_id": [1, 3]}}, {1, 3}),
        ({"generation_config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": "two"}}, {2}),
        (
            {"generation_config.json": {"eos_token_id": 1}, "tokenizer_config.json": {"eos_token": {"content": "two"}}},
            {1, 2},
        ),
        # "one two" is no token.
        ({"tokenizer_config.json": {"eos_token": "one two"}}, set()),
        ({"tokenizer_config.json": {"eos_token": None}, "generation_config.json": {}}, set()),
    ],
)
def test_they_are_named_in_several_places(files: dict[str, Any], expected: set[int], tmp_path: Path) -> None:
    tokenizer = tokenizers.load(write_tokenizer(tmp_path / "tokenizer.json", ["one", "two", "three"]))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert end_tokens(ModelConfig(), [tmp_path, tmp_path / "nowhere"], tokenizer) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {7, 9}),
        ({"generation_config.json": {}}, {7, 9}),
        ({"generation_config.json": {"eos_token_id": 1}}, {1}),
        ({"tokenizer_config.json": {"eos_token": "a"}}, {7, 9, 97}),
    ],
)
def test_the_model_s_own_count_where_no_folder_says_what_is_generated_with(
    files: dict[str, Any], expected: set[int], tmp_path: Path
) -> None:
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert end_tokens(ModelConfig(eos_token_ids=(7, 9)), [tmp_path], tokenizers.load("bytes")) == expected


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
