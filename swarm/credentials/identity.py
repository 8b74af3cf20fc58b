"""A peer's key, of which its id is the digest: it signs what the peer announces, and belongs to its TLS certificate.

No peer can announce under another's id. In a locked run a Token, which an OwnerKey issued, admits the peer.
"""

import base64
import datetime
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.credentials import certificates
from swarm.credentials.authority import Authority
from swarm.credentials.rights import Role
from swarm.errors import IntegrityError, NotAllowed
from swarm.machine.disk import write_private
from swarm.types import PeerId

PREFIX = "swarm1-"
"""The beginning of every token, by which people and programs recognize it."""
_KEY_BYTES = 32
_LENGTH_BYTES = 2


@dataclass(frozen=True)
class Identity:
    """A private key with the certificate made from it."""

    peer_id: PeerId
    """40 hexadecimal digits, from the public key."""
    certificate_pem: str
    """The certificate that others pin: self-signed, or in a locked run issued by a token, whose certificate follows
    it."""
    key_pem: str = field(repr=False)
    """The private key, for this peer's own server only."""
    authority: Authority | None = None
    """The owner of the locked run that this peer is a member of; None in an open one."""

    def sign(self, message: bytes) -> bytes:
        """The ECDSA-SHA256 signature of a message, in DER."""
        return self._key.sign(message, certificates.SIGNATURE)

    def sign_with_point(self, message: bytes) -> tuple[bytes, bytes]:
        """The public key's point, of which the id is the digest, and the signature."""
        return certificates.point_of(self._key.public_key()), self.sign(message)

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        # Kept, because to read it takes many times as long as to sign.
        return certificates.load_key(self.key_pem)


def generate() -> Identity:
    key = certificates.new_key()
    return _identity(key, certificates.self_signed(key, datetime.datetime.now(datetime.UTC)))


def load_or_create(path: Path) -> Identity:
    """Read the identity file, or make one that only its owner can read. Raises IntegrityError if the file holds no
    identity; one line says what to do. Raises OSError if the file cannot be read or written."""
    if path.exists():
        try:
            return _identity(*certificates.load_pair(path.read_text()))
        except (UnicodeDecodeError, IntegrityError):
            raise IntegrityError(f"{path} is not a peer's identity: delete it to start with a new one") from None
    identity = generate()
    write_private(path, identity.key_pem + identity.certificate_pem)
    return identity


def _identity(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Identity:
    certificate_pem = certificates.to_pem(certificate)
    peer_id = certificates.peer_id_of(certificate_pem)
    return Identity(peer_id=peer_id, certificate_pem=certificate_pem, key_pem=certificates.key_pem(key))


def verify(certificate_pem: str, message: bytes, signature: bytes) -> None:
    """Raise IntegrityError unless the certificate's key made the signature."""
    certificates.verify(certificates.public_key(certificates.load(certificate_pem)), message, signature)


@dataclass(frozen=True)
class Token:
    """The right to join a run until it expires."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    owner: x509.Certificate

    @property
    def role(self) -> Role:
        return certificates.role_of(self.certificate)

    @property
    def name(self) -> str:
        return certificates.common_name(self.certificate)

    @property
    def token_id(self) -> str:
        return certificates.fingerprint(self.certificate)[: certificates.TOKEN_DIGITS]

    @property
    def expires_at(self) -> float:
        """When the token expires, in seconds since the epoch."""
        return self.certificate.not_valid_after_utc.timestamp()

    @property
    def authority(self) -> Authority:
        return Authority(certificates.to_pem(self.owner))

    def admit(self, identity: Identity) -> Identity:
        """Return the identity with a certificate that this token issues; key and id stay the same."""
        own = certificates.member(certificates.load_key(identity.key_pem), self.certificate, self.key)
        chain_pem = certificates.to_pem(own) + certificates.to_pem(self.certificate)
        return replace(identity, certificate_pem=chain_pem, authority=self.authority)

    def __str__(self) -> str:
        """The string that the owner hands out. It is a secret: a process that knows it can join."""
        der = self.certificate.public_bytes(serialization.Encoding.DER)
        secret = self.key.private_numbers().private_value.to_bytes(_KEY_BYTES, "big")
        parts = [secret, len(der).to_bytes(_LENGTH_BYTES, "big"), der]
        parts.append(self.owner.public_bytes(serialization.Encoding.DER))
        return PREFIX + base64.urlsafe_b64encode(b"".join(parts)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError if the text is no token. The message is one line that does not repeat
        the text."""
        try:
            return cls._parse(text.strip())
        except (*certificates.FAULTS, InvalidSignature, IntegrityError, NotAllowed):
            raise ValueError(
                f"that is no join token: copy all of what `swarm-keys issue` prints, {PREFIX}..., in one piece"
            ) from None

    @classmethod
    def _parse(cls, text: str) -> Self:
        if not text.startswith(PREFIX):
            raise ValueError("no token")
        encoded = text.removeprefix(PREFIX)
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        key = ec.derive_private_key(int.from_bytes(data[:_KEY_BYTES], "big"), ec.SECP256R1())
        begins = _KEY_BYTES + _LENGTH_BYTES
        ends = begins + int.from_bytes(data[_KEY_BYTES:begins], "big")
        certificate = x509.load_der_x509_certificate(data[begins:ends])
        owner = x509.load_der_x509_certificate(data[ends:])
        if certificates.public_key(certificate) != key.public_key():
            raise ValueError("another key's certificate")
        certificate.verify_directly_issued_by(owner)
        token = cls(certificate=certificate, key=key, owner=owner)
        # The token is tried out here, so that a fault shows now, and not when this process joins a peer.
        admitted = token.admit(generate())
        token.authority.member(admitted.certificate_pem, token.expires_at)
        return token


@dataclass(frozen=True)
class OwnerKey:
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate

    @property
    def authority(self) -> Authority:
        return Authority(certificates.to_pem(self.certificate))

    def issue(self, role: Role, *, name: str, now: datetime.datetime, lifetime: datetime.timedelta) -> Token:
        """Make a token. Raises ValueError if the token would be valid for longer than the owner's certificate, or the
        name is not allowed."""
        if not 0 < len(name) <= 64 or name == certificates.OWNER_NAME:
            raise ValueError(f"a token's name has 1 to 64 characters and is not {certificates.OWNER_NAME!r}")
        expires = (now + lifetime).replace(microsecond=0)
        if expires > self.certificate.not_valid_after_utc:
            raise ValueError(f"the owner's key holds until {self.certificate.not_valid_after_utc:%Y-%m-%d}, not longer")
        key = certificates.new_key()
        certificate = certificates.token(key, self.key, role=role, name=name, now=now, expires=expires)
        return Token(certificate=certificate, key=key, owner=self.certificate)

    def sign(self, message: bytes) -> bytes:
        """The ECDSA-SHA256 signature of a message, in DER."""
        return self.key.sign(message, certificates.SIGNATURE)

    def save(self, path: Path) -> None:
        """Write the key to a new file that only this user can read. Raises FileExistsError, OSError."""
        if path.exists():
            raise FileExistsError(f"{path} is there already: an owner's key is not replaced; take another name")
        write_private(path, certificates.key_pem(self.key) + certificates.to_pem(self.certificate))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an owner's key. Raises ValueError if the file holds none, OSError if it cannot be read."""
        try:
            key, certificate = certificates.load_pair(path.read_text())
        except (UnicodeDecodeError, IntegrityError):
            raise ValueError(f"{path} is not an owner's key: `swarm-keys new FILE` makes one") from None
        return cls(key=key, certificate=certificate)


def new_owner(now: datetime.datetime) -> OwnerKey:
    key = certificates.new_key()
    return OwnerKey(key=key, certificate=certificates.owner(key, now))
