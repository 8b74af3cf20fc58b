"""With which tokens a text ends, or an assistant's turn in a conversation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig
from swarm.data.tokenizers import Tokenizer


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
        ends: Any = _read(folder / "generation_config.json").get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(token, int) for token in ends):
            raise ValueError(f"{folder}: eos_token_id must be a token's number, or a list of such")
        numbers.update(ends)
        token = _read(folder / "tokenizer_config.json").get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and len(ids := tokenizer.encode(token)) == 1:
            named.update(ids.tolist())
    return frozenset((numbers or set(model.eos_token_ids)) | named)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is no JSON") from None
    return values if isinstance(values, dict) else {}
