"""Files that survive a power cut: they have to be on the disk, and not only on their way there, to be relied on.

Used by checkpoint/file, credentials/identity and dht/node.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make sure that a file's contents, or a folder's names, survive a power cut. Blocks. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a complete file within its folder, and replace what has that name. Blocks. Raises OSError.

    A power cut leaves either what was there before or all of the file. If the file were not synced before it is
    renamed, it might be found empty.
    """
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)
