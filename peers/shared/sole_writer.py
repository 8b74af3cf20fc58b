"""Locks what only one process may use at a time: an output folder, an event log, a key (by a file beside it).

Used by swarm-peer, swarm-trainer and swarm-local at their start. The lock is on the file or folder itself, so that
nothing is left behind. It ends with the process, however the process ends: no child inherits the lock.
"""

import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def require_sole_writer(path: Path, given_as: str) -> int:
    """Lock a folder, or a file, which is made if missing. Return a descriptor that holds the lock until it is closed.

    Where the file system has no such locks, no process is kept out.

    Args:
        given_as: what the user typed.

    Raises:
        ValueError: another process has locked it.
        OSError: the path can neither be opened nor made.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"{given_as} is in use by another process on this machine: give each its own") from None
    except OSError as error:
        logger.debug("%s is not locked: %s", path, error)
    return descriptor
