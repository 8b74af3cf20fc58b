"""A tokenizer's files, as transformers keeps them in a model's folder. They belong to a run, and peers serve them.

A run's configuration has the digest of a list of the files, and the list has the digest of each file. No other file is
read, and nothing is executed.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from swarm.config.data import CLASS
from swarm.data import hub
from swarm.errors import IntegrityError
from swarm.machine import json_file
from swarm.machine.disk import whole_folder

TOKENIZER = "tokenizer.json"
FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json",
)  # fmt: skip
"""The files of a tokenizer: they say how text becomes tokens, how a conversation becomes text, and how a text ends."""
OTHER_FORMS = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""The files of a tokenizer in older forms."""
MOST_BYTES = 32 << 20
"""The largest size of a tokenizer's files, all together."""
MOST_LIST_BYTES = 4096
SERVED = "served"
"""The value of `data.tokenizer` in a run's configuration if the run's peers have the files."""


@dataclass(frozen=True)
class TokenizerFiles:
    contents: Mapping[str, bytes]

    @cached_property
    def list(self) -> bytes:
        """The list of the files: names and digests, as bytes that are the same on every machine."""
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}
        return json.dumps(digests, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the list, in hexadecimal: `data.tokenizer_files` of a run."""
        return hashlib.sha256(self.list).hexdigest()

    def content(self, sha256: str) -> bytes | None:
        """The list, or a file, with this digest; None if neither has it."""
        found = {hashlib.sha256(content).hexdigest(): content for content in (self.list, *self.contents.values())}
        return found.get(sha256)

    def write(self, folder: Path) -> None:
        """Write the files into a folder that is there. Blocks. Raises OSError."""
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)

    def keep(self, folder: Path) -> None:
        """Make a folder of the files, whole or not at all, unless it is there. Blocks. Raises OSError."""
        if not is_at(folder, self.digest):
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                with whole_folder(folder, waits=True) as temporary:
                    self.write(temporary)
            except ValueError:
                # The folder is there but damaged. It is not the user's, so it is written over.
                self.write(folder)


def has_files(spec: str) -> bool:
    """Whether the tokenizer that `data.tokenizer` names has files: bytes need none, and a class is code."""
    return spec != "bytes" and not spec.startswith(CLASS)


def located(spec: str) -> Path:
    """The tokenizer.json that `data.tokenizer` names: in a folder, by its path, or in a model on the hub. Blocks.
    Raises PeerUnavailable if the model cannot be downloaded."""
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return path / TOKENIZER
    if not path.exists() and hub.is_name(spec) and spec != SERVED:
        return hub.download(spec, FILES) / TOKENIZER
    return path


def require_json(path: Path) -> None:
    """Raise ValueError if a tokenizer.json is missing where a tokenizer lies in other files, which are not read."""
    others = [name for name in OTHER_FORMS if (path.parent / name).is_file()]
    if path.name == TOKENIZER and others and not path.is_file():
        folder = path.parent
        raise ValueError(
            f"{folder} has its tokenizer in {' and '.join(others)}, and no {TOKENIZER}: have transformers make one, "
            f'python -c "from transformers import AutoTokenizer as A; '
            f"A.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )


def read(path: Path) -> TokenizerFiles:
    """Read a tokenizer's files from a folder. Blocks. `path` is the folder; or a file, which is taken as the
    tokenizer.json, whatever its name. Raises ValueError if there is no tokenizer.json, or the files are too large, and
    OSError if the files cannot be read."""
    path = path / TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} is no file, and a tokenizer needs a {TOKENIZER}")
    paths = _paths(path.parent) | {TOKENIZER: path}
    return TokenizerFiles({name: file.read_bytes() for name, file in paths.items()})


def copy(source: Path, folder: Path) -> None:
    for name, file in _paths(source).items():
        shutil.copyfile(file, folder / name)


def require_sound(folder: Path) -> None:
    """Raise ValueError, one line, for a .json file beside the tokenizer.json that is no JSON object. Blocks.

    The tokenizer.json itself is checked by tokenizers.load.
    """
    for name, path in _paths(folder).items():
        if name.endswith(".json") and name != TOKENIZER:
            json_file.read_object(path)


def _paths(folder: Path) -> dict[str, Path]:
    here = {name: folder / name for name in FILES if (folder / name).is_file()}
    if sum(file.stat().st_size for file in here.values()) > MOST_BYTES:
        raise ValueError(f"the tokenizer in {folder} has more than {MOST_BYTES >> 20} MiB")
    return here


def token_text(token: Any) -> str | None:
    """The text of a token, which tokenizer_config.json gives alone or with options; None if it names none."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def is_at(folder: Path, digest: str) -> bool:
    """Whether a folder has the files with this digest. Blocks."""
    try:
        return read(folder).digest == digest
    except (OSError, ValueError):
        return False


def digests_of(content: bytes) -> dict[str, str]:
    """The digest of each file, read from a list of a tokenizer's files. Raises IntegrityError if it is no such list."""
    try:
        digests = {str(name): str(digest) for name, digest in json_file.parse(content).items()}
    except (ValueError, AttributeError):
        digests = {}
    if TOKENIZER not in digests or not digests.keys() <= set(FILES):
        raise IntegrityError("that is no list of a tokenizer's files")
    if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests.values()):
        raise IntegrityError("a list of a tokenizer's files names no digests")
    return digests


def place_of(digest: str, spec: str, places: Sequence[Path]) -> str:
    """The place of a run's tokenizer on this machine: the first of these folders that has its files, else `spec`."""
    return next((str(place) for place in places if digest and is_at(place, digest)), spec)
