"""Text files: finds the files that a dataset names, in the corpus's order, and reads their text in pieces.

The choice, the order and the pieces depend only on the files' contents and on their paths below their common folder, so
machines with the same files get the same text. A file counts as text if all of it is UTF-8 without NUL characters; any
other file is left out whole. No more than a few pieces of a file are in memory.
"""

import codecs
import glob
import gzip
import hashlib
import io
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from swarm.config.data import WELL_KNOWN

STDLIB = "stdlib"
PIECE_CHARACTERS = 2**18
"""About how many characters a piece has; it never has more than three times as many."""
CHUNK_BYTES = 2**20
_COMPRESSED = ".gz"
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a damaged file with this ending raises."""
_NOT_STDLIB_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# These hold settings of Python's build, and differ between machines with the same Python.
_NOT_STDLIB_FILES = ("_sysconfigdata", "python-config")


@dataclass(frozen=True)
class Found:
    """The files that a dataset names.

    Attributes:
        files: files that can be opened, in the corpus's order. Only `fault` tells whether they hold text.
        unreadable: files and folders that cannot be opened: the reason by path.
    """

    files: list[Path] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)


def find(dataset: str) -> Found:
    """Find the files of `stdlib`, of `stdlib:FOLDER`, or of a file, folder or glob.

    Hidden files and folders count only if they are named themselves.

    Raises:
        ValueError: one line, if there is no such file, folder or glob.
    """
    unreadable: dict[Path, str] = {}
    if is_stdlib(dataset):
        root = Path(sysconfig.get_path("stdlib"), dataset.partition(":")[2])
        if not root.is_dir():
            raise ValueError(f"data.dataset {dataset!r}: this Python's standard library has no such folder")
        below = _walk(root, unreadable, skipped_folders=_NOT_STDLIB_TEXT)
        paths = [path for path in below if path.suffix == ".py" and not path.name.startswith(_NOT_STDLIB_FILES)]
    else:
        paths = _named(dataset, unreadable)
    unreadable |= {path: reason for path in paths if (reason := _why_unreadable(path))}
    return Found(_in_corpus_order([path for path in paths if path not in unreadable]), unreadable)


def is_stdlib(dataset: str) -> bool:
    return dataset.partition(":")[0] == STDLIB


def fault(path: Path) -> str:
    """Read a whole file, and return why it is no text or cannot be read; "" for a text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read = 0
    try:
        with opened(path) as file:
            while True:
                chunk = file.read(CHUNK_BYTES)
                # The decoder still holds these bytes of an incomplete character.
                num_pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    return f"not UTF-8 at byte {num_read - num_pending + error.start}"
                if (place := chunk.find(0)) >= 0:
                    return f"a NUL character at byte {num_read + place}"
                if not chunk:
                    return ""
                num_read += len(chunk)
    except (OSError, *DAMAGED) as error:
        return getattr(error, "strerror", None) or str(error)


def opened(path: Path) -> BinaryIO:
    """Open a file to read its bytes; of a compressed one, those that it was made of. Raises OSError."""
    return cast(BinaryIO, gzip.open(path, "rb")) if ending(path)[1] else path.open("rb")


def ending(path: Path) -> tuple[str, bool]:
    """How a file's name ends, in lower case and without what its compression adds, and whether it is compressed."""
    name = Path(path.name.lower())
    is_compressed = name.suffix == _COMPRESSED
    return (name.with_suffix("") if is_compressed else name).suffix, is_compressed


def pieces(path: Path) -> Iterator[str]:
    """The text of a file that has no `fault`, in pieces of whole lines.

    A line is cut only if it goes on for more than `PIECE_CHARACTERS` beyond the end of a piece. It is cut before the
    spaces in front of its last word, because most tokenizers begin a token there, or at that length if it has no space.
    Without a space, or with a tokenizer that marks the beginning of a text, the tokens at a cut may differ from those
    of the uncut line. They are the same on every machine.
    """
    rest = ""
    with io.TextIOWrapper(opened(path), encoding="utf-8", newline="") as file:
        while True:
            # `readline` completes the line of which `read` took a part, or adds the next line.
            piece, line = rest + file.read(PIECE_CHARACTERS), file.readline(PIECE_CHARACTERS)
            goes_on = len(line) == PIECE_CHARACTERS and line[-1] not in "\r\n"
            end = _last_word(line) if goes_on else len(line)
            piece, rest = piece + line[:end], line[end:]
            if not piece:
                return
            yield piece


def _last_word(line: str) -> int:
    """The index at which the spaces before a line's last word begin; the line's length if nothing is before them."""
    return len(line.rpartition(" ")[0].rstrip(" ")) or len(line)


def _named(dataset: str, unreadable: dict[Path, str]) -> list[Path]:
    # Not Path.expanduser, which raises for an unknown user: this function leaves such a name as it is.
    path = Path(os.path.expanduser(dataset)).absolute()
    if path.is_dir():
        return _walk(path, unreadable)
    if os.path.lexists(path):
        return [path]
    if not glob.has_magic(dataset):
        raise ValueError(
            f"data.dataset {dataset!r} does not exist; give 'stdlib', a file, folder or glob of text, or 'hf:NAME': "
            f"{WELL_KNOWN}"
        )
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    return [match for match in matches if not match.is_dir()]


def _walk(root: Path, unreadable: dict[Path, str], *, skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    def note(error: OSError) -> None:
        unreadable[Path(error.filename)] = error.strerror or str(error)

    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=note):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped_folders]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found


def _why_unreadable(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Not opened, because a pipe to which nothing writes would block.
            return "not a regular file"
        path.open("rb").close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _in_corpus_order(files: list[Path]) -> list[Path]:
    """The files, sorted by the hash of their path, so that the end, which is held out, is a fair sample of all."""
    if not files:
        return []
    root = os.path.commonpath([path.parent for path in files])

    def rank(path: Path) -> bytes:
        return hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()

    return sorted(files, key=rank)
