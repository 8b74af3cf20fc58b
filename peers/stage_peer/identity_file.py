"""Chooses the key file that a peer uses: the same one after a restart, never one that another running peer uses.

Used by swarm-peer. The lock on the file ends with the process, however the process ends.
"""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from peers.shared.sole_writer import require_sole_writer
from swarm.credentials import identity as identities
from swarm.credentials.identity import Identity


@dataclass(frozen=True, kw_only=True)
class ClaimedIdentity:
    """An identity that no other process on this machine can claim while `lock` is open.

    Attributes:
        libp2p_path: the file of the key that the peer's DHT node uses, which need not exist yet.
    """

    identity: Identity
    libp2p_path: Path
    lock: IO[str]


def claim_identity(path: Path | None, folder: Path, label: str) -> ClaimedIdentity:
    """Claim the file `path`, or else the first free one with a label (`stage-2`, say) in `folder`; make it if missing.

    Where the file system has no locks, no process is kept out.

    Raises:
        ValueError: the named file is in use by another peer.
        IntegrityError: the file is no identity.
    """
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
