"""What the environment says to every program: where its cache is, and, in `.env` of the working folder, which keys it
has for the services that it reports to or downloads from.
"""

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

NAMES = ("HF_TOKEN", "WANDB_API_KEY")
"""The variables that are read; a file that happens to lie there changes nothing else of a program."""
FILE = Path(".env")
_LINE = re.compile(r"\s*(?:export\s+)?(\w+)\s*=\s*(.*?)\s*")
_QUOTED = re.compile(r"""(["'])(.*)\1(?:\s+#.*)?""")


def cache_folder() -> Path:
    """The folder of this user's keys and prepared texts. Raises ValueError if the environment names none."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise ValueError("there is no home directory: say in XDG_CACHE_HOME where to keep keys and prepared texts")
    return Path(folder) / "swarm"


def kept_tokenizer(cache: Path, digest: str) -> Path:
    return cache / "tokenizers" / digest


def keep_compiled_code(environment: MutableMapping[str, str]) -> None:
    """Have torch.compile keep its code in this user's folder, unless the environment names another one. By itself torch
    takes a folder of /tmp, which is gone when the machine starts again. Raises ValueError as cache_folder."""
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


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
