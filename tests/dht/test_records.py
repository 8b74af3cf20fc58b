"""Sealed records, as readers see them: whatever a stranger changes, they are refused."""

import binascii
import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from swarm import identity
from swarm.dht.records import MAX_LIFETIME_SECONDS, MAX_RECORD_BYTES, Envelope, open_record, seal
from swarm.errors import IntegrityError, MalformedMessage

NOW = 1000.0
EXPIRATION = NOW + 60
OWNER = identity.generate()
THIEF = identity.generate()


class Note(BaseModel):
    text: str


SEALED = seal(OWNER, "key", Note(text="hello"), EXPIRATION)


def _changed(**fields: str) -> bytes:
    return Envelope.model_validate_json(SEALED).model_copy(update=fields).model_dump_json().encode()


def _open(key: str = "key", subkey: str = OWNER.peer_id, value: bytes = SEALED, expiration: float = EXPIRATION) -> Note:
    return open_record(Note, key, subkey, value, expiration, NOW)


def test_a_sealed_record_opens() -> None:
    assert _open() == Note(text="hello")


@pytest.mark.parametrize(
    "stolen",
    [
        lambda: _open(subkey=THIEF.peer_id),
        lambda: _open(subkey=THIEF.peer_id, value=_changed(certificate_pem=THIEF.certificate_pem)),
        lambda: _open(value=_changed(certificate_pem=THIEF.certificate_pem)),
        lambda: _open(value=seal(THIEF, "key", Note(text="hello"), EXPIRATION)),
        lambda: _open(key="another key"),
        lambda: _open(key="another key", value=_changed(key="another key")),
        lambda: _open(value=_changed(payload='{"text":"bye"}')),
        lambda: _open(expiration=EXPIRATION + 1),
        lambda: _open(value=_changed(certificate_pem="no certificate")),
        lambda: _open(value=_changed(signature=binascii.b2a_base64(THIEF.sign(b"x"), newline=False).decode())),
    ],
)
def test_what_the_owner_did_not_sign_is_refused(stolen: Callable[[], Any]) -> None:
    with pytest.raises(IntegrityError):
        stolen()


@pytest.mark.parametrize(
    "malformed",
    [
        lambda: _open(value=b""),
        lambda: _open(value=b"[]"),
        lambda: _open(value=b"\xff\x00"),
        lambda: _open(value=_changed(signature="no base64!")),
        lambda: _open(value=SEALED + b" " * MAX_RECORD_BYTES),
        lambda: open_record(Envelope, "key", OWNER.peer_id, SEALED, EXPIRATION, NOW),
    ],
)
def test_what_makes_no_sense_is_malformed(malformed: Callable[[], Any]) -> None:
    with pytest.raises(MalformedMessage):
        malformed()


@pytest.mark.parametrize("expiration", [NOW + MAX_LIFETIME_SECONDS + 1, math.inf, math.nan])
def test_even_its_owner_cannot_make_a_record_last(expiration: float) -> None:
    """The DHT prefers the farthest expiry: such a record could never be replaced."""
    value = seal(OWNER, "key", Note(text="for ever"), expiration)
    with pytest.raises(IntegrityError, match="expires more than 120 s from now"):
        _open(value=value, expiration=expiration)


def test_too_large_a_payload_is_not_sealed() -> None:
    with pytest.raises(ValueError, match=r"^a record for key has \d+ bytes"):
        seal(OWNER, "key", Note(text="x" * MAX_RECORD_BYTES), EXPIRATION)
