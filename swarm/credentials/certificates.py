"""X.509: makes keys and the certificates of open runs' peers, which they sign themselves, and reads from certificates.

Never decides which peer is trusted. What locked runs add is in token.py and authority.py.
"""

import datetime
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.errors import IntegrityError
from swarm.types import PeerId

PEER_NAME = "swarm-peer"
"""The subject of every peer's certificate. TLS has to check some name; the pinned certificate identifies the peer."""
PEER_NAMES = x509.SubjectAlternativeName([x509.DNSName(PEER_NAME)])

FAULTS = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
)
"""The exceptions that the library cryptography raises for keys and certificates that it cannot read."""

SIGNATURE = ec.ECDSA(hashes.SHA256())
LONG = datetime.timedelta(days=3650)
EARLIER = datetime.timedelta(days=1)
"""A certificate is valid from this long before it is made, so that machines with slow clocks accept it too."""
_END = "-----END CERTIFICATE-----\n"


@contextmanager
def _reading(fault: str) -> Iterator[None]:
    try:
        yield
    except FAULTS:
        raise IntegrityError(fault) from None


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    """A private key as PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    """The inverse of `key_pem`. Raises ValueError, TypeError or UnsupportedAlgorithm for anything else."""
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key


def load_pair(pem: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Read a private key and, after it, the key's certificate. Raises IntegrityError for anything else."""
    with _reading("not a key and a certificate"):
        key = load_key(pem)
        certificate = load(pem[pem.index("-----BEGIN CERTIFICATE-----") :])
    if public_key(certificate) != key.public_key():
        raise IntegrityError("another key's certificate")
    return key, certificate


def self_signed(key: ec.EllipticCurvePrivateKey, now: datetime.datetime) -> x509.Certificate:
    unsigned = builder(PEER_NAME, key.public_key(), PEER_NAME, now - EARLIER, now + LONG)
    return unsigned.add_extension(PEER_NAMES, critical=False).sign(key, hashes.SHA256())


def builder(
    subject: str, key: ec.EllipticCurvePublicKey, issuer: str, begins: datetime.datetime, ends: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


def to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def load(pem: str) -> x509.Certificate:
    """Read the first certificate of a chain. Raises IntegrityError if the text begins with none."""
    with _reading("not an X.509 certificate"):
        return x509.load_pem_x509_certificate(pem.encode())


def load_all(pem: str) -> list[x509.Certificate]:
    """Read all certificates of a chain, the peer's own first. Raises IntegrityError for none, or a broken one."""
    with _reading("not X.509 certificates"):
        return x509.load_pem_x509_certificates(pem.encode())


def first_pem(chain_pem: str) -> str:
    """The first certificate of a chain, as PEM. It is the peer's own."""
    return chain_pem[: chain_pem.find(_END) + len(_END)] if _END in chain_pem else chain_pem


def public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """A certificate's key. Raises IntegrityError if it is not an elliptic-curve key."""
    with _reading("a certificate's key cannot be read"):
        key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise IntegrityError("not an elliptic-curve certificate")
    return key


@lru_cache(maxsize=512)
def peer_id_of(certificate_pem: str) -> PeerId:
    """The id of the peer with this certificate, or first of a chain. Raises IntegrityError if the text is none.

    The result is cached, because every call that a peer serves needs it.
    """
    return PeerId(fingerprint(load(certificate_pem))[:40])


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate's public key, in hexadecimal. Raises IntegrityError as `public_key` does."""
    return fingerprint_of(public_key(certificate))


def fingerprint_of(key: ec.EllipticCurvePublicKey) -> str:
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()


def point_of(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in 33 bytes: its compressed point (SEC 1, section 2.3.3)."""
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)


def key_at(point: bytes) -> ec.EllipticCurvePublicKey:
    """The inverse of `point_of`. Raises ValueError for anything else."""
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)


def verify(key: ec.EllipticCurvePublicKey, message: bytes, signature: bytes) -> None:
    """Raise IntegrityError unless the key made this ECDSA-SHA256 signature, in DER."""
    try:
        key.verify(signature, message, SIGNATURE)
    except InvalidSignature:
        raise IntegrityError("the signature does not fit the record") from None


def common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""
