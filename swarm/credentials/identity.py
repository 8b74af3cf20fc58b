"""A peer's key: it gives the peer its id, signs what the peer announces, and belongs to its TLS certificate.

Each peer has one ECDSA P-256 key; the peer's id is the digest of its public key, so no peer can announce under
another's id. Never sends the private key anywhere.
"""

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.credentials import certificates
from swarm.credentials.authority import Authority
from swarm.errors import IntegrityError
from swarm.machine.disk import write_private
from swarm.types import PeerId

_SIGNATURE = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Identity:
    """A private key with the certificate made from it.

    Attributes:
        peer_id: 40 hexadecimal digits, from the public key.
        certificate_pem: the certificate that others pin: self-signed, or in a locked run issued by a token, whose
            certificate follows it.
        key_pem: the private key, for this peer's own server only.
        authority: the owner of the locked run that this peer is a member of; None in an open one.
    """

    peer_id: PeerId
    certificate_pem: str
    key_pem: str = field(repr=False)
    authority: Authority | None = None

    def sign(self, message: bytes) -> bytes:
        """The ECDSA-SHA256 signature of a message, in DER."""
        return certificates.load_key(self.key_pem).sign(message, _SIGNATURE)


def generate() -> Identity:
    key = certificates.new_key()
    return _identity(key, certificates.self_signed(key, datetime.datetime.now(datetime.UTC)))


def load_or_create(path: Path) -> Identity:
    """Read the identity file, or make one that only its owner can read.

    Raises:
        IntegrityError: the file holds no identity; one line says what to do.
        OSError: the file cannot be read or written.
    """
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
    try:
        certificates.public_key(certificates.load(certificate_pem)).verify(signature, message, _SIGNATURE)
    except InvalidSignature:
        raise IntegrityError("the signature does not fit the record") from None
