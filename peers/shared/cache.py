"""The folder in which programs keep keys, prepared texts and tokenizers from one start to the next."""

import os
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
