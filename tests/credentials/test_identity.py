"""Identities are made once, kept private, and impossible to mix up."""

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from swarm.credentials import identity
from swarm.credentials.identity import load_or_create
from swarm.errors import IntegrityError
from tests.support import locked


def test_an_identity_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "identity.pem"
    made = identity.load_or_create(path)
    assert identity.load_or_create(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_key_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the key were lost, a peer that has announced itself would come back as another one."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    identity.load_or_create(tmp_path / "identity.pem")
    assert synced == [(tmp_path / "identity.pem").stat().st_ino, tmp_path.stat().st_ino]


def test_a_signature_fits_one_key_and_one_message() -> None:
    ours, theirs = identity.generate(), identity.generate()
    signature = ours.sign(b"message")
    identity.verify(ours.certificate_pem, b"message", signature)
    for certificate, message, forged in [
        (theirs.certificate_pem, b"message", signature),
        (ours.certificate_pem, b"another", signature),
        (ours.certificate_pem, b"message", b"no DER"),
    ]:
        with pytest.raises(IntegrityError):
            identity.verify(certificate, message, forged)


def _encrypted(made: identity.Identity) -> str:
    key = serialization.load_pem_private_key(made.key_pem.encode(), password=None)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    ).decode()


def _rsa_key() -> str:
    key = rsa.generate_private_key(65537, 2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


@pytest.mark.parametrize("fault", ["text", "binary", "no certificate", "another's certificate", "encrypted", "RSA"])
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    made = identity.generate()
    content = {
        "text": b"hello", "binary": b"\xff\xfe\x00", "no certificate": made.key_pem.encode(),
        "another's certificate": (made.key_pem + identity.generate().certificate_pem).encode(),
        "encrypted": (_encrypted(made) + made.certificate_pem).encode(),
        "RSA": (_rsa_key() + made.certificate_pem).encode(),
    }[fault]  # fmt: skip
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"^\S+identity\.pem is not a peer's identity: delete it to start .*$"):
        identity.load_or_create(path)


def test_a_peers_identity_file_is_none_of_the_runs(tmp_path: Path) -> None:
    """The certificate that a token issues is made anew at every start."""
    made = load_or_create(tmp_path / "peer.pem")
    locked.PEER_TOKEN.admit(made)
    assert load_or_create(tmp_path / "peer.pem") == made
    assert made.authority is None
