"""The tokens with which texts begin and end, and with which batches are filled up, as a model's folder names them.

They change nothing of what a model computes, and much of where its texts end. Import reads them into the run's
configuration, with which they come to every peer, checkpoint and export, also where there is no tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig
from swarm.machine import json_file

GENERATION = "generation_config.json"
_FIELDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_ids", "pad_token_id": "pad_token_id"}
"""Ours, by their keys."""


def read(folder: Path, config: Mapping[str, Any], defaults: Mapping[str, int], *, vocab_size: int) -> dict[str, Any]:
    """Fields of our configuration, from the files of a model's folder.

    A token that the model does not have is left out: it never comes.

    Args:
        config: what config.json holds. What generation_config.json says goes before it, as in transformers.
        defaults: where neither has a key. Null says that there is no such token.

    Raises:
        ValueError: one line, for what is no token's number.
    """
    generation = json_file.read_object(folder / GENERATION)
    fields: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        value = generation.get(key)
        value = config.get(key, defaults.get(key)) if value is None else value
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise ValueError(f"{folder}: {key} is {value!r}, and should be a token's number, or a list of such")
        known = tuple(token for token in tokens if 0 <= token < vocab_size)
        fields[field] = known if field == "eos_token_ids" else next(iter(known), -1)
    return fields


def write(model: ModelConfig) -> dict[str, Any]:
    """Their keys. Null where there is no such token: left out, some classes would take one of their own."""
    ends = list(model.eos_token_ids)
    return {
        "bos_token_id": model.bos_token_id if model.bos_token_id >= 0 else None,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": model.pad_token_id if model.pad_token_id >= 0 else None,
    }
