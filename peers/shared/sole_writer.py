"""What only one process may use at a time: an output folder, an event log, a key.

The lock is on the file or folder itself, or on a file beside a key. It ends with the process, however the process ends:
no child inherits it.
"""

import fcntl
import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swarm.credentials import identity as identities
from swarm.credentials.identity import Identity

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


@dataclass(frozen=True, kw_only=True)
class ClaimedIdentity:
    """An identity that no other process on this machine can claim while `lock` is open. The file of the key that the
    peer's DHT node uses (`libp2p_path`) need not exist yet."""

    identity: Identity
    libp2p_path: Path
    lock: IO[str]


def claim_identity(path: Path | None, folder: Path, label: str) -> ClaimedIdentity:
    """Claim the file `path`, or else the first free one with a label (`stage-2`, say) in `folder`; make it if missing.
    Where the file system has no locks, no process is kept out. Raises ValueError if the named file is in use by another
    peer, and IntegrityError if the file is no identity."""
    if path is None:
        return next(filter(None, (_try_claim(folder / f"{label}.{number}.pem") for number in itertools.count())))
    claimed = _try_claim(path)
    if claimed is None:
        raise ValueError(f"--identity {path} is in use by another peer on this machine: give each its own")
    return claimed


def _try_claim(path: Path) -> ClaimedIdentity | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # The suffix is appended and does not replace one, because key files may be called `peer.0` and `peer.1`.
        lock = os.fdopen(require_sole_writer(path.with_name(f"{path.name}.lock"), f"--identity {path}"), "w")
    except ValueError:
        return None
    libp2p_path = path.with_suffix(".p2p") if path.suffix == ".pem" else path.with_name(f"{path.name}.p2p")
    try:
        identity = identities.load_or_create(path)
    except BaseException:
        lock.close()
        raise
    return ClaimedIdentity(identity=identity, libp2p_path=libp2p_path, lock=lock)
