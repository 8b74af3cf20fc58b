"""With which tokens a text ends, or an assistant's turn in a conversation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig
from swarm.data.tokenizers import Tokenizer
from swarm.machine import json_file


def end_tokens(model: ModelConfig, folders: Sequence[Path], tokenizer: Tokenizer) -> frozenset[int]:
    """The end tokens of a model, by their numbers and as the tokenizer's `eos_token`; none if none are named.

    Args:
        model: what it names counts where no folder has a generation_config.json that does.
        folders: of the tokenizer and the model, as transformers writes them.

    Raises:
        ValueError: one line, if a file is no JSON or names something else.
    """
    numbers, named = set[int](), set[int]()
    for folder in folders:
        ends: Any = json_file.read_object(folder / "generation_config.json").get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(token, int) for token in ends):
            raise ValueError(f"{folder}: eos_token_id must be a token's number, or a list of such")
        numbers.update(ends)
        token = json_file.read_object(folder / "tokenizer_config.json").get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and len(ids := tokenizer.encode(token)) == 1:
            named.update(ids.tolist())
    return frozenset((numbers or set(model.eos_token_ids)) | named)
