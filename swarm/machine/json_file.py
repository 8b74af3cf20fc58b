"""JSON files: those that anybody may have written, such as a model's or a dataset's, and those that people read."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parse(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: one line says why the text is no JSON, but not where it came from.
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
        # Python refuses longer numbers, since the time to read one grows with the square of its length.
        raise ValueError(f"it has a number of more than {sys.get_int_max_str_digits():,} digits") from None


def read_object(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        is_optional: whether a missing file counts as an empty object.

    Raises:
        ValueError: the file cannot be read, or holds no JSON object; the message is one line.
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


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, indented for people. Raises OSError, or ValueError for NaN and infinity."""
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
