"""The tokens with which texts begin and end, and with which batches are padded, as a model's folder names them.

They do not change what a model computes, but they decide where its texts end. Import reads them into the run's
configuration, so that every peer, checkpoint and export has them, even without a tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig
from swarm.data.end_tokens import token_numbers
from swarm.machine import json_file

GENERATION = "generation_config.json"
_FIELDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_ids", "pad_token_id": "pad_token_id"}
"""Our fields, by the keys of transformers' files."""
_NONE = -1
"""Means "no token", in our configuration and in the files of the first Llamas."""


def read(folder: Path, config: Mapping[str, Any], defaults: Mapping[str, int], *, vocab_size: int) -> dict[str, Any]:
    """Fields of our configuration, from the files of a model's folder.

    Args:
        config: the contents of config.json. Values in generation_config.json take precedence, as in transformers.
        defaults: the values of keys that neither file has. (Null means that there is no such token.) A small model may
            have too few tokens for a default, even if its files name the default, which is then left out.

    Raises:
        ValueError: one line, for a value that is no token's number, or no token of the model.
    """
    generation = json_file.read_object(folder / GENERATION, is_optional=True)
    fields: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        default = defaults.get(key, _NONE)
        in_config = _known(config.get(key, default), f"{folder / 'config.json'}: {key}", default, vocab_size)
        in_generation = _known(generation.get(key), f"{folder / GENERATION}: {key}", default, vocab_size)
        tokens = in_config if generation.get(key) is None else in_generation
        fields[field] = tokens if field == "eos_token_ids" else next(iter(tokens), _NONE)
    return fields


def _known(value: Any, what: str, default: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens that a value names. Raises ValueError for one that the model does not have, unless it is a default."""
    tokens = token_numbers(value, what)
    for token in tokens:
        if not (0 <= token < vocab_size or token in (_NONE, default)):
            raise ValueError(f"{what} names the token {token}, and the model has those from 0 to {vocab_size - 1}")
    return tuple(token for token in tokens if 0 <= token < vocab_size)


def write(model: ModelConfig) -> dict[str, Any]:
    """Transformers' keys for these tokens. "No token" is written as null, because without a key some classes would use
    a default."""
    ends = list(model.eos_token_ids)
    return {
        "bos_token_id": model.bos_token_id if model.bos_token_id >= 0 else None,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": model.pad_token_id if model.pad_token_id >= 0 else None,
    }
