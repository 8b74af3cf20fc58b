"""DHT records that were changed on their way, or were never valid. The node's validator and the readers refuse all of
them.

The validator is the one that the DHT node hands to hivemind, with hivemind's own hashes and packing.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from swarm.credentials.identity import Identity
from swarm.dht.directory import Directory
from swarm.dht.known_records import RecordValidator
from swarm.dht.records import Envelope, seal
from swarm.types import Block, PeerRecord, PeerState
from tests.intruders.mutations import changed_bytes
from tests.support import locked
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore

NOW = locked.NOW.timestamp()
KEY = "run.0123.stage.1"


@dataclass
class Stored:
    """A DHTRecord, as hivemind shows it."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def _record(who: Identity) -> PeerRecord:
    return PeerRecord(
        peer_id=who.peer_id, announced_at=NOW, stage=1, endpoint="192.0.2.1:1", certificate_pem=who.certificate_pem,
        state=PeerState.SERVING,
    )  # fmt: skip


def _hash(key: str) -> bytes:
    # Not at the top: importing hivemind changes the logging of the process.
    from hivemind.dht.routing import DHTID

    hashed: bytes = DHTID.generate(key).to_bytes()
    return hashed


def _pack(value: object) -> bytes:
    from hivemind.utils import MSGPackSerializer

    packed: bytes = MSGPackSerializer.dumps(value)
    return packed


def _stored(value: bytes, subkey: str, expiration: float, key: str = KEY) -> Stored:
    return Stored(_hash(key), _pack(subkey), _pack(value), expiration)


def _validator(authority: Any) -> RecordValidator:
    validator = RecordValidator(ManualClock(NOW), hash_key=_hash, pack=_pack)
    validator.belong_to([KEY], authority)
    return validator


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_records", [500, pytest.param(50_000, marks=pytest.mark.slow)])
async def test_no_changed_record_is_believed(num_records: int) -> None:
    """Each is offered to a node of a locked run, to a node of an open run, and to a reader."""
    chance, clock = random.Random(0), ManualClock(NOW)
    strict, lenient = _validator(locked.OWNER.authority), _validator(None)
    expiration = NOW + 60
    values = {who: seal(who, KEY, _record(who), expiration) for who in (locked.PEER, locked.OTHER_PEER, locked.OPEN)}
    for who, value in values.items():
        assert strict.validate(_stored(value, who.peer_id, expiration)) == (who is not locked.OPEN)
        assert lenient.validate(_stored(value, who.peer_id, expiration))
    store = MemoryStore(clock)
    accepted = 0
    for number in range(num_records):
        who = chance.choice(list(values))
        original = values[who]
        subkey, lasts = str(who.peer_id), expiration
        match chance.randrange(6):
            case 0 | 1 | 2:
                value = changed_bytes(original, chance)
            case 3:
                other = chance.choice(list(values))
                fields = chance.choice([{"certificate_pem": other.certificate_pem}, {"key": "run.0123.stage.2"}])
                value = Envelope.model_validate_json(original).model_copy(update=fields).model_dump_json().encode()
            case 4:
                value, lasts = original, chance.choice([expiration + 1e-3, NOW + 1e9, float("inf"), float("nan"), -1.0])
            case _:
                value = original
                subkey = chance.choice(["", "x", locked.TRAINER.peer_id, who.peer_id[:-1] + "\x00", "é" * 40])
        if value == original and (subkey, lasts) == (who.peer_id, expiration):
            continue
        stored = _stored(value, subkey, lasts)
        if chance.random() < 0.2:
            stored.value = changed_bytes(stored.value, chance)
        for validator in (strict, lenient):
            accepted += validator.validate(stored) and not _says_the_same(value, original)
        if lasts > NOW:
            await store.store(KEY, f"{subkey}#{number}" if number % 2 else subkey, value, lasts)
    assert accepted == 0
    reader = Directory(store, locked.TRAINER, "run.0123", clock)
    assert {record.peer_id for record in await reader.peers(Block(1))} <= {
        locked.PEER.peer_id,
        locked.OTHER_PEER.peer_id,
    }


def _says_the_same(value: bytes, original: bytes) -> bool:
    """Whether nothing relevant was changed: white space in JSON or in a certificate's envelope does not matter."""
    try:
        ours, theirs = (Envelope.model_validate_json(data) for data in (original, value))
    except ValueError:
        return False
    return (ours.key, ours.payload) == (theirs.key, theirs.payload)
