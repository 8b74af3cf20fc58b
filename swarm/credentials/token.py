"""A token, the right to join a locked run, and the OwnerKey that issues it.

The owner's key issues tokens, and a token issues a certificate to every peer that holds it. So a peer shows a chain of
two certificates, its own, then the token's, which authority.py reads.
"""

import base64
import datetime
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.credentials import certificates
from swarm.credentials.authority import TOKEN_DIGITS, Authority, role_of
from swarm.credentials.identity import Identity, generate
from swarm.credentials.rights import Role
from swarm.errors import IntegrityError, NotAllowed
from swarm.machine.disk import write_private

OWNER_NAME = "swarm-owner"
PREFIX = "swarm1-"
"""The beginning of every token, by which people and programs recognize it."""
_KEY_BYTES = 32
_LENGTH_BYTES = 2


@dataclass(frozen=True)
class Token:
    """The right to join a run until it expires."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    owner: x509.Certificate

    @property
    def role(self) -> Role:
        return role_of(self.certificate)

    @property
    def name(self) -> str:
        return certificates.common_name(self.certificate)

    @property
    def token_id(self) -> str:
        return certificates.fingerprint(self.certificate)[:TOKEN_DIGITS]

    @property
    def expires_at(self) -> float:
        """When the token expires, in seconds since the epoch."""
        return self.certificate.not_valid_after_utc.timestamp()

    @property
    def authority(self) -> Authority:
        return Authority(certificates.to_pem(self.owner))

    def admit(self, identity: Identity) -> Identity:
        """Return the identity with a certificate that this token issues, which is valid as long as the token is, and
        cannot issue further ones; key and id stay the same."""
        key, begins = certificates.load_key(identity.key_pem).public_key(), self.certificate.not_valid_before_utc
        own = (
            certificates.builder(certificates.PEER_NAME, key, self.name, begins, self.certificate.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(self.role.usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(certificates.PEER_NAMES, critical=False)
            .sign(self.key, hashes.SHA256())
        )
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
        if not 0 < len(name) <= 64 or name == OWNER_NAME:
            raise ValueError(f"a token's name has 1 to 64 characters and is not {OWNER_NAME!r}")
        expires = (now + lifetime).replace(microsecond=0)
        if expires > self.certificate.not_valid_after_utc:
            raise ValueError(f"the owner's key holds until {self.certificate.not_valid_after_utc:%Y-%m-%d}, not longer")
        key = certificates.new_key()
        builder = certificates.builder(name, key.public_key(), OWNER_NAME, now - certificates.EARLIER, expires)
        builder = builder.add_extension(x509.ExtendedKeyUsage(role.usages), critical=False)
        certificate = _issuing(builder, key, self.key, path_length=0).sign(self.key, hashes.SHA256())
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
    ends = now + certificates.LONG
    builder = certificates.builder(OWNER_NAME, key.public_key(), OWNER_NAME, now - certificates.EARLIER, ends)
    return OwnerKey(key=key, certificate=_issuing(builder, key, key, path_length=1).sign(key, hashes.SHA256()))


def _issuing(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey, *,
    path_length: int,
) -> x509.CertificateBuilder:  # fmt: skip
    signs_only = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(signs_only, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
