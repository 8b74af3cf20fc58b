"""JSON files that lie beside models and tokenizers, and that anybody may have written."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """What the file's object holds; nothing if there is no file, or no object in it.

    Raises:
        ValueError: one line, if it is no JSON, or is nested without end.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is no JSON") from None
    return values if isinstance(values, dict) else {}
