"""`.env` in the working folder: keys for services that a program reports to or downloads from.

Read by every program before it begins. Only the variables in NAMES are read, and a variable that the environment
already has is not changed. Values are never logged.
"""

import os
import re
from pathlib import Path

NAMES = ("HF_TOKEN", "WANDB_API_KEY")
"""The variables that are read; a file that happens to lie there changes nothing else of a program."""

FILE = Path(".env")

_LINE = re.compile(r"\s*(?:export\s+)?(\w+)\s*=\s*(.*?)\s*")
_QUOTED = re.compile(r"""(["'])(.*)\1(?:\s+#.*)?""")


def read(path: Path = FILE) -> None:
    """Add the variables of a file to the environment; do nothing if there is no file.

    Lines are `NAME=VALUE`, perhaps with `export` before them, quotes around the value or a comment behind it.

    Raises:
        ValueError: the file cannot be read, or a name has no value that could be a key. The message quotes no value.
    """
    try:
        if path.exists() and not path.is_file():
            # It may be a folder (some keep their virtual environment there), or a pipe, whose end we would wait for.
            return
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read {path}: {reason}") from None
    for number, line in enumerate(lines, start=1):
        if (found := _LINE.fullmatch(line)) and found[1] in NAMES and found[1] not in os.environ:
            os.environ[found[1]] = _value(found[2], f"{path}, line {number}: {found[1]}")


def _value(text: str, place: str) -> str:
    if text.startswith(('"', "'")):
        quoted = _QUOTED.fullmatch(text)
        value = "" if quoted is None else quoted[2]
    else:
        value = re.split(r"(?:^|\s)#", text)[0].strip()
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{place} has no key: write NAME=KEY, or leave the line out")
    return value
