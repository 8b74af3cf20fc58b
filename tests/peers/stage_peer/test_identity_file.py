"""Which key a peer gets: stable over restarts, never shared by two running peers."""

import errno
import fcntl
from pathlib import Path

import pytest

from peers.stage_peer.identity_file import claim_identity
from swarm.errors import IntegrityError


def test_a_restarted_peer_keeps_its_identity(tmp_path: Path) -> None:
    first = claim_identity(None, tmp_path, "stage-1")
    first.lock.close()
    again = claim_identity(None, tmp_path, "stage-1")
    assert again.identity == first.identity


def test_a_second_peer_of_the_stage_gets_its_own(tmp_path: Path) -> None:
    first, second = claim_identity(None, tmp_path, "stage-1"), claim_identity(None, tmp_path, "stage-1")
    assert first.identity.peer_id != second.identity.peer_id
    first.lock.close()
    assert claim_identity(None, tmp_path, "stage-1").identity == first.identity


def test_a_named_file_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.pem"
    claimed = claim_identity(path, tmp_path, "stage-0")
    with pytest.raises(ValueError, match="in use by another peer"):
        claim_identity(path, tmp_path, "stage-0")
    claimed.lock.close()
    assert claim_identity(path, tmp_path, "stage-0").identity == claimed.identity


def test_files_whose_names_differ_in_their_ending_are_two(tmp_path: Path) -> None:
    one, other = (claim_identity(tmp_path / name, tmp_path, "stage-0") for name in ("peer.0", "peer.1"))
    assert one.libp2p_path != other.libp2p_path
    claimed = claim_identity(tmp_path / "peer.pem", tmp_path, "stage-0")
    assert claimed.libp2p_path == tmp_path / "peer.p2p"


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert claim_identity(None, tmp_path, "stage-1").identity.peer_id


def test_a_file_that_is_no_identity_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.pem"
    path.write_text("something else")
    with pytest.raises(IntegrityError, match=r"notes\.pem is not a peer's identity"):
        claim_identity(path, tmp_path, "stage-0")
    assert path.read_text() == "something else"
