"""The folder in which programs keep keys, prepared texts, tokenizers and compiled code from one start to the next."""

import os
from collections.abc import MutableMapping
from pathlib import Path


def cache_folder() -> Path:
    """The folder of this user's keys and prepared texts. Raises ValueError if the environment names none."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise ValueError("there is no home directory: say in XDG_CACHE_HOME where to keep keys and prepared texts")
    return Path(folder) / "swarm"


def kept_tokenizer(cache: Path, digest: str) -> Path:
    """The folder in which the tokenizer with this digest (`data.tokenizer_files`) is kept."""
    return cache / "tokenizers" / digest


def keep_compiled_code(environment: MutableMapping[str, str]) -> None:
    """Have torch.compile keep its code in this user's folder, unless the environment names another one.

    By itself torch takes a folder of /tmp, which is gone when the machine starts again. Raises ValueError as
    cache_folder.
    """
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
