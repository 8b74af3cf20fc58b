"""Finds the end tokens of a model: the tokens that end a text, or an assistant's turn in a conversation."""

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig
from swarm.config.data import Format
from swarm.data.tokenizers import Tokenizer
from swarm.machine import json_file


def end_tokens(
    model: ModelConfig, folders: Sequence[Path], tokenizer: Tokenizer, *, format: Format = "text"
) -> frozenset[int]:
    """The end tokens that files and configuration name, by number or as the tokenizer's `eos_token`, and the one that
    ends what the run learns; may be empty.

    Args:
        model: the model's configuration. Its eos_token_ids count only if no generation_config.json names any.
        folders: of the tokenizer and the model, as transformers writes them.
        format: of the run's text. A completion ends in a newline, where the tokenizer has no end token.

    Raises:
        ValueError: one line, if a file is no JSON, or names something that is no token.
    """
    numbers, named = set[int](), set[int]()
    for folder in folders:
        path = folder / "generation_config.json"
        ends = json_file.read_object(path, is_optional=True).get("eos_token_id")
        numbers.update(token_numbers(ends, f"{path}: eos_token_id"))
        token = json_file.read_object(folder / "tokenizer_config.json", is_optional=True).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and len(ids := tokenizer.encode(token)) == 1:
            named.update(ids.tolist())
    if tokenizer.end is not None:
        named.add(tokenizer.end)
    elif format == "completion" and len(tokenizer.separator) == 1:
        named.update(tokenizer.separator.tolist())
    return frozenset((numbers or set(model.eos_token_ids)) | named)


def token_numbers(value: Any, what: str) -> tuple[int, ...]:
    """The tokens that a value names: a number is one token, a list several, and None (null) none.

    Args:
        what: where the value stands, for the message.

    Raises:
        ValueError: it is anything else.
    """
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ValueError(f"{what} is {reprlib.repr(value)}, and should be a token's number, or a list of such")
    return tuple(tokens)
