"""Downloads models' files from Hugging Face's hub. Nothing of them is executed.

Used by data/tokenizer_files, interchange/source and swarm-model. The library huggingface_hub is installed with
tokenizers. It keeps downloads in a cache of its own, and finds them there without a network.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from swarm.errors import PeerUnavailable, in_one_line

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_name(text: str) -> bool:
    """Whether a text may be a model's name on the hub (`gpt2`, `OWNER/NAME`), and not a path or a file's name."""
    return _NAME.fullmatch(text) is not None and not text.endswith((".json", ".toml", ".model"))


def download(name: str, patterns: Sequence[str]) -> Path:
    """Download files of a model, unless they are here already; gives their folder. Blocks.

    Raises:
        PeerUnavailable: one line, if the files cannot be downloaded.
    """
    # It is imported only here, because that takes a while, and most runs do not need it.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # noqa: BLE001 - the library raises its own and those of its HTTP client
        raise PeerUnavailable(
            f"{name} is no folder here, and cannot be downloaded from the hub: {one_line(error)}"
        ) from None


def one_line(error: Exception) -> str:
    """The message of one of the library's errors, on one line, cut to 300 characters."""
    return in_one_line(error)[:300]
