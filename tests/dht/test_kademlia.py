"""The bounds of one of hivemind's nodes, without p2pd."""

import os
import time
from pathlib import Path

import pytest
from pydantic import BaseModel

from swarm.credentials import identity
from swarm.dht.records import seal
from swarm.machine.clock import SystemClock


class Note(BaseModel):
    text: str = "hello"


def test_a_record_that_is_renewed_all_the_time_takes_no_more_room() -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.utils import MSGPackSerializer

    from swarm.dht import kademlia

    key, key_id, signer = "notes", DHTID.generate("notes"), identity.generate()
    validator = kademlia.new_validator(SystemClock())
    validator.belong_to([key], None)
    storage = kademlia.BoundedStorage(validator)
    for number in range(300):
        expiration = time.time() + 30 + number / 100
        value = MSGPackSerializer.dumps(seal(signer, key, Note(), expiration))
        assert storage.store_subkey(key_id, signer.peer_id, value, expiration)
    [(_, (kept, _))] = storage.items()
    assert len(storage.expiration_heap) < 100
    assert len(kept.expiration_heap) < 100


def test_a_node_s_key_is_never_readable_by_others_and_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind makes the file private only after it has written the key."""
    from swarm.dht import kademlia

    modes, synced = list[int](), list[int]()

    def generate(path: str) -> None:
        Path(path).write_text("key")
        modes.append(Path(path).stat().st_mode & 0o777)

    monkeypatch.setattr("hivemind.p2p.P2P.generate_identity", generate)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    mask = os.umask(0o022)
    try:
        path = tmp_path / "new" / "peer.p2p"
        kademlia.require_key_file(path)
        assert os.umask(0o022) == 0o022, "only for that file"
    finally:
        os.umask(mask)
    assert modes == [0o600]
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]
