"""Writes files so that they survive a power cut: they are on the disk, and not only in the system's buffers.

Used by checkpoint/file, credentials, dht/kademlia, interchange, and the dashboard for its history.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Put a file's contents, or a folder's list of names, on the disk itself. Blocks. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a complete file within its folder, and replace any file of that name. Blocks. Raises OSError.

    After a power cut either the former file or all of the new one is there. If the new file were not synced before it
    is renamed, it might be empty.
    """
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all, and make its folder. Blocks. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    put_in_place(temporary, path)


def require_new(path: Path) -> None:
    """Raise ValueError if anything but an empty folder has this path."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already: name a folder that is not, or is empty")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give the block a new folder to fill, which gets its name afterwards. If the block fails, nothing is left. Blocks.

    Raises:
        ValueError: anything but an empty folder has this path.
        OSError: the folder cannot be made.
    """
    require_new(path)
    temporary = path.with_name(f".{path.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():
            path.rmdir()
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
