"""A peer's key: it names the peer, signs what the peer announces, and proves the peer's TLS certificate.

Used by dht/ (signing and checking records) and rpc/ (TLS). One ECDSA P-256 key a peer; the peer's id is the
digest of its public key, so nobody can announce under another's id. Never sends the private key anywhere.
"""

import datetime
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.errors import IntegrityError
from swarm.types import PeerId

CERTIFICATE_NAME = "swarm-peer"
"""Subject of every peer's certificate. TLS checks a name; which peer it is, the pinned certificate says."""

_VALIDITY = datetime.timedelta(days=3650)
_SIGNATURE = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Identity:
    """A private key with the certificate made from it.

    Attributes:
        peer_id: 40 hexadecimal digits, from the public key.
        certificate_pem: self-signed; what others pin.
        key_pem: the private key, for this peer's own server only.
    """

    peer_id: PeerId
    certificate_pem: str
    key_pem: str = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """ECDSA-SHA256 signature, DER."""
        key = serialization.load_pem_private_key(self.key_pem.encode(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key.sign(message, _SIGNATURE)


def generate() -> Identity:
    """Make a new identity."""
    return _from_key(ec.generate_private_key(ec.SECP256R1()))


def load_or_create(path: Path) -> Identity:
    """Read the identity file, or make one that only its owner can read.

    Raises:
        IntegrityError: the file is no identity; one line says what to do.
        OSError: the file cannot be read or written.
    """
    if path.exists():
        try:
            content = path.read_text()
            key = serialization.load_pem_private_key(content.encode(), password=None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError("not an elliptic-curve key")
            certificate = content[content.index("-----BEGIN CERTIFICATE-----") :]
            peer_id = peer_id_of(certificate)
            if _public_key(certificate) != key.public_key():
                raise ValueError("another key's certificate")
        # TypeError: the key is encrypted.
        except (ValueError, TypeError, UnsupportedAlgorithm, IntegrityError):
            raise IntegrityError(f"{path} is not a peer's identity: delete it to start with a new one") from None
        return Identity(peer_id=peer_id, certificate_pem=certificate, key_pem=_pem(key))
    identity = generate()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(identity.key_pem + identity.certificate_pem)
    temporary.rename(path)
    return identity


def peer_id_of(certificate_pem: str) -> PeerId:
    """The id that belongs to a certificate. Raises IntegrityError if it is no P-256 certificate."""
    public_key = _public_key(certificate_pem)
    encoded = public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PeerId(hashlib.sha256(encoded).hexdigest()[:40])


def verify(certificate_pem: str, message: bytes, signature: bytes) -> None:
    """Raise IntegrityError unless the certificate's key made the signature."""
    try:
        _public_key(certificate_pem).verify(signature, message, _SIGNATURE)
    except InvalidSignature:
        raise IntegrityError("the signature does not fit the record") from None


def _from_key(key: ec.EllipticCurvePrivateKey) -> Identity:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A clock that runs slow must not refuse a certificate made just now.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return Identity(peer_id=peer_id_of(certificate_pem), certificate_pem=certificate_pem, key_pem=_pem(key))


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _public_key(certificate_pem: str) -> ec.EllipticCurvePublicKey:
    try:
        key = x509.load_pem_x509_certificate(certificate_pem.encode()).public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise IntegrityError("not an X.509 certificate") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise IntegrityError("not an elliptic-curve certificate")
    return key
