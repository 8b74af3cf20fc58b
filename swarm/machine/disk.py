"""What has to be on the disk, and not merely on its way there, when something else relies on it.

Used by checkpoint/file, identity and dht/node. Knows nothing of what is in the files.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have a file's contents, or a folder's names, survive a power cut from now on. Blocks. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a file that is complete its name, in the same folder; what had it is replaced. Blocks. Raises OSError.

    A power cut leaves either what was there before, or all of the file: renamed unsynced, it may be found empty.
    """
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)
