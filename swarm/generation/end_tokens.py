"""With which tokens a text ends, or an assistant's turn in a conversation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.data.tokenizers import Tokenizer


def end_tokens(folders: Sequence[Path], tokenizer: Tokenizer) -> frozenset[int]:
    """The end tokens that a model's folders name, by their numbers and as the tokenizer's `eos_token`; none if none do.

    Raises:
        ValueError: one line, if a file is no JSON or names something else.
    """
    found = set[int]()
    for folder in folders:
        # What is generated with goes before what the model was trained with.
        values = (_read(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json"))
        ends: Any = next((value for value in values if value is not None), [])
        ends = ends if isinstance(ends, list) else [ends]
        if not all(isinstance(token, int) for token in ends):
            raise ValueError(f"{folder}: eos_token_id must be a token's number, or a list of such")
        found.update(ends)
        token = _read(folder / "tokenizer_config.json").get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and len(ids := tokenizer.encode(token)) == 1:
            found.update(ids.tolist())
    return frozenset(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None
    return values if isinstance(values, dict) else {}
