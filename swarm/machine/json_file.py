"""JSON that anybody may have written: files that lie beside models and tokenizers, and rows of texts."""

import json
import sys
from pathlib import Path
from typing import Any


def parse(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: one line that says why it is none, without saying where it came from.
    """
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is not valid JSON: it is nested too deeply") from None
    except ValueError:
        # Python reads no longer numbers, since that takes time with the square of their length.
        raise ValueError(f"it has a number of more than {sys.get_int_max_str_digits():,} digits") from None


def read_object(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """What the object in a file holds.

    Args:
        is_optional: nothing stands for a file that is not there.

    Raises:
        ValueError: one line, if it cannot be read, or holds anything else.
    """
    if is_optional and not path.is_file():
        return {}
    try:
        values = parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"cannot read {path}: it holds no JSON object")
    return values
