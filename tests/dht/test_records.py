"""Sealed records, as readers see them: whatever a stranger changes in one, it is refused."""

import binascii
import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from swarm.credentials import identity
from swarm.dht.records import MAX_LIFETIME_SECONDS, MAX_RECORD_BYTES, Envelope, open_record, seal
from swarm.errors import IntegrityError, MalformedMessage, NotAllowed
from tests.support import locked

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
    return open_record(Note, key, subkey, value, expiration, NOW)[0]


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
    """The DHT keeps the record that expires last, so a lasting one could never be replaced."""
    value = seal(OWNER, "key", Note(text="for ever"), expiration)
    with pytest.raises(IntegrityError, match="expires more than 120 s from now"):
        _open(value=value, expiration=expiration)


# -- in a locked run ---------------------------------------------------------------------------------------------------

THEN = locked.NOW.timestamp()
STAGE, TRAINERS = "run.0123.stage.1", "run.0123.trainers"


def _read(signer: identity.Identity, key: str = STAGE, *, value: bytes | None = None) -> Note:
    sealed = seal(signer, key, Note(text="hello"), THEN + 60) if value is None else value
    return open_record(Note, key, signer.peer_id, sealed, THEN + 60, THEN, locked.OWNER.authority)[0]


def test_members_speak_where_they_may() -> None:
    for signer, key in ((locked.PEER, STAGE), (locked.PEER, TRAINERS), (locked.TRAINER, TRAINERS)):
        assert _read(signer, key) == Note(text="hello")


@pytest.mark.parametrize(
    "signer",
    [locked.OPEN, locked.EXPIRED, locked.FOREIGN, locked.passed_on(), locked.promoted(), locked.TRAINER],
    ids=["no token", "expired", "another run", "passed on", "promoted", "a trainer at a stage"],
)
def test_nobody_else_is_heard(signer: identity.Identity) -> None:
    with pytest.raises(NotAllowed):
        _read(signer)


def test_a_members_record_is_of_no_use_to_others() -> None:
    """It is refused with another member's certificates, and with the thief's own in their place."""
    stolen = Envelope.model_validate_json(seal(locked.PEER, STAGE, Note(text="hello"), THEN + 60))
    for thief in (locked.OTHER_PEER, locked.TRAINER, locked.FOREIGN, locked.OPEN):
        swapped = stolen.model_copy(update={"certificate_pem": thief.certificate_pem}).model_dump_json().encode()
        for subkey in (thief, locked.PEER):
            with pytest.raises((IntegrityError, NotAllowed)):
                _read(subkey, value=swapped)


def test_a_member_whose_time_is_over_is_not_heard_any_more() -> None:
    later = locked.PEER_TOKEN.expires_at + 1
    sealed = seal(locked.PEER, STAGE, Note(text="hello"), later + 60)
    with pytest.raises(NotAllowed, match="has expired"):
        open_record(Note, STAGE, locked.PEER.peer_id, sealed, later + 60, later, locked.OWNER.authority)
