"""Signed records: the values in the DHT. Their signatures make records from unknown nodes trustworthy.

The signature covers a record's key, its subkey, which is the signer's peer id, its expiration and its payload. So no
peer can announce under another's name, move a record to another key, or prolong its life.
"""

import binascii
import json
from functools import lru_cache
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from swarm.credentials import certificates, identity
from swarm.credentials.authority import Authority
from swarm.credentials.rights import require_announcement
from swarm.errors import IntegrityError, MalformedMessage

MAX_LIFETIME_SECONDS = 120.0
"""A record that expires later than this from now is refused. Of one subkey's records the DHT keeps the one that expires
last, so such a record could stay for ever."""
MAX_RECORD_BYTES = 16 * 1024

Model = TypeVar("Model", bound=BaseModel)


class Envelope(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    key: str
    payload: str
    """JSON of the model that belongs to the key."""
    certificate_pem: str
    """The signer's certificate, and in a locked run that of the token which issued it."""
    signature: str
    """In base64, over key, subkey, expiration and payload."""


def seal(signer: identity.Identity, key: str, payload: BaseModel, expiration: float) -> bytes:
    """Make the record that `signer` stores under `key` and its own peer id until `expiration`, in seconds since the
    epoch. Raises ValueError if the payload is too large."""
    text = payload.model_dump_json()
    signature = signer.sign(_signed_bytes(key, signer.peer_id, text, expiration))
    envelope = Envelope(
        key=key,
        payload=text,
        certificate_pem=signer.certificate_pem,
        signature=binascii.b2a_base64(signature, newline=False).decode(),
    )
    record = envelope.model_dump_json().encode()
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"a record for {key} has {len(record)} bytes, more than the {MAX_RECORD_BYTES} the DHT takes")
    return record


def verify(subkey: str, record: bytes, expiration: float, now: float, authority: Authority | None) -> Envelope:
    """Check everything about a record, except its schema and the key under which it was found. With an `authority` only
    members may announce.

    Raises MalformedMessage if the bytes are no envelope, or too many, IntegrityError if the record is forged or stolen,
    or expires too far in the future, and NotAllowed if the signer is no member, or may not use the key.
    """
    # The comparison is written with "not ... <=", so that it refuses NaN too.
    if not expiration <= now + MAX_LIFETIME_SECONDS:
        raise IntegrityError(f"a record of {subkey} expires more than {MAX_LIFETIME_SECONDS:.0f} s from now")
    envelope = _verify_signature(subkey, record, expiration)
    if authority is not None:
        require_announcement(authority.member(envelope.certificate_pem, now).role, envelope.key)
    return envelope


def open_record(
    model: type[Model], key: str, subkey: str, record: bytes, expiration: float, now: float,
    authority: Authority | None = None,
) -> tuple[Model, str]:  # fmt: skip
    """Verify a record found under `key` and `subkey`. Returns its payload, and the certificates in it: the signer's,
    and in a locked run the token's.

    Raises what `verify` does, MalformedMessage if the payload breaks the schema, and IntegrityError if it is from
    another key.
    """
    envelope = verify(subkey, record, expiration, now, authority)
    if envelope.key != key:
        raise IntegrityError(f"a record of {subkey} under {key} was signed for {envelope.key}")
    try:
        return model.model_validate_json(envelope.payload), envelope.certificate_pem
    except ValidationError as error:
        raise MalformedMessage(f"a record of {subkey} under {key}: {_first_fault(error)}") from None


# Cached because the DHT checks every record again whenever its key is read. An entry takes about 5 KB, and every
# announcement adds one.
@lru_cache(maxsize=1024)
def _verify_signature(subkey: str, record: bytes, expiration: float) -> Envelope:
    if len(record) > MAX_RECORD_BYTES:
        raise MalformedMessage(f"a record of {subkey} has {len(record)} bytes")
    try:
        envelope = Envelope.model_validate_json(record)
        signature = binascii.a2b_base64(envelope.signature, strict_mode=True)
        signed = _signed_bytes(envelope.key, subkey, envelope.payload, expiration)
    except ValidationError as error:
        raise MalformedMessage(f"a record of {subkey}: {_first_fault(error)}") from None
    except ValueError:
        raise MalformedMessage(f"a record of {subkey}: the signature is not base64") from None
    if certificates.peer_id_of(envelope.certificate_pem) != subkey:
        raise IntegrityError(f"a record of {subkey} was signed by another peer")
    identity.verify(envelope.certificate_pem, signed, signature)
    return envelope


def _signed_bytes(key: str, subkey: str, payload: str, expiration: float) -> bytes:
    return json.dumps(["swarm record", key, subkey, expiration, payload]).encode()


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ")
