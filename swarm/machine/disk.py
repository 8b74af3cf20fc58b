"""Writes files so that they survive a power cut: they are on the disk, and not only in the system's buffers."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = ".partial"
"""Where the files of an empty folder are prepared, within it."""


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a path at which to write a file, which then replaces any file at `path`. If the block fails,
    nothing is left of it. Blocks. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all, and make its folder. Blocks. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with replacing(path) as temporary, open(os.open(temporary, flags, 0o600), "w") as file:
        file.write(text)


def require_new(path: Path) -> None:
    """Raise ValueError if anything but an empty folder has this path."""
    if path.exists() and (not path.is_dir() or any(entry.name != _UNFINISHED for entry in path.iterdir())):
        raise ValueError(f"{path} is there already: name a folder that is not, or is empty")


@contextmanager
def whole_folder(path: Path, *, waits: bool = False) -> Iterator[Path]:
    """Give the block a folder to fill, of which the files then get their place. If the block fails, nothing is left.
    Blocks. `waits` says whether to wait for another process that is filling the folder. Raises ValueError if anything
    but an empty folder has this path, or another process is filling it, and OSError if the folder cannot be made."""
    require_new(path)
    # An empty folder is filled and not replaced: a disk may be mounted there, or it may be a shell's current folder.
    is_there = path.is_dir()
    temporary = path / _UNFINISHED if is_there else path.with_name(f".{path.name}.partial")
    moved = list[Path]()
    with _locked(temporary, path, waits):
        try:
            require_new(path)
            yield temporary
            if is_there:
                moved += [entry.rename(path / entry.name) for entry in list(temporary.iterdir())]
                temporary.rmdir()
            else:
                temporary.rename(path)
        except BaseException:
            for left in (*moved, temporary):
                _remove(left)
            raise


@contextmanager
def _locked(temporary: Path, path: Path, waits: bool) -> Iterator[None]:
    """Make the folder in which `path` is prepared, empty it of what a killed process left, and keep others from it."""
    while True:
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_RDONLY)
        except FileNotFoundError:
            # The process that had the lock has renamed the folder or removed it since.
            continue
        try:
            _lock(descriptor, path, waits)
            # The process that had the lock before may have renamed the folder, or removed it.
            if temporary.exists() and os.path.samestat(os.fstat(descriptor), temporary.stat()):
                for left in list(temporary.iterdir()):
                    _remove(left)
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path, waits: bool) -> None:
    """Lock the open folder in which `path` is prepared. Raises ValueError if another process has it, unless waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process: name another folder, or wait") from None
    except OSError:
        # The file system has no locks, so no other process can be kept out.
        return


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
