"""Which key file a peer uses: the same one after a restart, never one that another running peer uses.

Used by swarm-peer. The lock on the file ends with the process, however it ends.
"""

import fcntl
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swarm import identity as identities
from swarm.identity import Identity


@dataclass(frozen=True, kw_only=True)
class ClaimedIdentity:
    """An identity that no other process on this machine can claim while `lock` is open."""

    identity: Identity
    path: Path
    lock: IO[str]


def claim_identity(path: Path | None, folder: Path, label: str) -> ClaimedIdentity:
    """Claim the named file, or the first free one with a label (`stage-2`, say) in `folder`; make it if missing.

    Raises:
        ValueError: the named file is in use by another peer.
        IntegrityError: the file is no identity.
    """
    if path is not None:
        claimed = _try_claim(path)
        if claimed is None:
            raise ValueError(f"--identity {path} is in use by another peer on this machine: give each its own")
        return claimed
    for number in itertools.count():
        claimed = _try_claim(folder / f"{label}.{number}.pem")
        if claimed is not None:
            return claimed
    raise AssertionError("counting never ends")


def _try_claim(path: Path) -> ClaimedIdentity | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return ClaimedIdentity(identity=identities.load_or_create(path), path=path, lock=lock)
