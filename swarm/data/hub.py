"""Hugging Face's hub: names there, and what is downloaded of them. Nothing of it is executed.

Used by data/tokenizers and swarm-model. The library comes with tokenizers. It keeps what it downloads in a cache of its
own, where it is found again without a network.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from swarm.errors import PeerUnavailable, in_one_line

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_name(text: str) -> bool:
    """Whether this may be the name of a model: `gpt2`, or `OWNER/NAME`, and neither a path nor a file."""
    return _NAME.fullmatch(text) is not None and not text.endswith((".json", ".toml", ".model"))


def download(name: str, patterns: Sequence[str]) -> Path:
    """The folder with these files of a model, downloaded unless they are here already. Blocks.

    Raises:
        PeerUnavailable: one line, if the hub does not give them.
    """
    # Only now: it takes a while to import, and most runs do not need it.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # noqa: BLE001 - the library raises its own and those of its HTTP client
        raise PeerUnavailable(
            f"{name} is no folder here, and cannot be downloaded from the hub: {one_line(error)}"
        ) from None


def one_line(error: Exception) -> str:
    """What an error of the library says, not too long."""
    return in_one_line(error)[:300]
