"""A peer's key, of which its id is the digest: it signs what the peer announces, and belongs to its TLS certificate.

No peer can announce under another's id. In a locked run a Token admits the peer (token.py).
"""

import datetime
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.credentials import certificates
from swarm.credentials.authority import Authority
from swarm.errors import IntegrityError
from swarm.machine.disk import write_private
from swarm.types import PeerId


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
        return self._point, self.sign(message)

    @cached_property
    def _point(self) -> bytes:
        return certificates.point_of(self._key.public_key())

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
