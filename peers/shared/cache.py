"""The folder with what programs keep on this machine from one start to the next: keys, and texts that were prepared."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's keys and prepared texts are kept. Raises ValueError if nothing says where that is."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise ValueError("there is no home directory: say in XDG_CACHE_HOME where to keep keys and prepared texts")
    return Path(folder) / "swarm"


def kept_tokenizer(cache: Path, digest: str) -> Path:
    """The folder in which the tokenizer of this `data.tokenizer_files` is kept."""
    return cache / "tokenizers" / digest
