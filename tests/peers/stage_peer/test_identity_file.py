"""Which key a peer gets: stable over restarts, never shared by two running peers."""

import errno
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peers.stage_peer import identity_file
from peers.stage_peer.identity_file import ClaimedIdentity
from swarm.errors import IntegrityError

Claim = Callable[[Path | None, Path, str], ClaimedIdentity]


@pytest.fixture
def claim() -> Iterator[Claim]:
    """A function that claims identities until the test is over."""
    claimed = []

    def claim(path: Path | None, folder: Path, label: str) -> ClaimedIdentity:
        claimed.append(identity_file.claim_identity(path, folder, label))
        return claimed[-1]

    yield claim
    for one in claimed:
        one.lock.close()


def test_a_restarted_peer_keeps_its_identity(claim: Claim, tmp_path: Path) -> None:
    first = claim(None, tmp_path, "stage-1")
    first.lock.close()
    again = claim(None, tmp_path, "stage-1")
    assert again.identity == first.identity


def test_a_second_peer_of_the_stage_gets_its_own(claim: Claim, tmp_path: Path) -> None:
    first, second = claim(None, tmp_path, "stage-1"), claim(None, tmp_path, "stage-1")
    assert first.identity.peer_id != second.identity.peer_id
    first.lock.close()
    assert claim(None, tmp_path, "stage-1").identity == first.identity


def test_a_named_file_in_use_is_refused(claim: Claim, tmp_path: Path) -> None:
    path = tmp_path / "mine.pem"
    claimed = claim(path, tmp_path, "stage-0")
    with pytest.raises(ValueError, match="in use by another peer"):
        claim(path, tmp_path, "stage-0")
    claimed.lock.close()
    assert claim(path, tmp_path, "stage-0").identity == claimed.identity


def test_files_whose_names_differ_in_their_ending_are_two(claim: Claim, tmp_path: Path) -> None:
    one, other = (claim(tmp_path / name, tmp_path, "stage-0") for name in ("peer.0", "peer.1"))
    assert one.libp2p_path != other.libp2p_path
    claimed = claim(tmp_path / "peer.pem", tmp_path, "stage-0")
    assert claimed.libp2p_path == tmp_path / "peer.p2p"


def test_a_file_system_without_locks_keeps_nobody_out(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert claim(None, tmp_path, "stage-1").identity.peer_id


def test_a_file_that_is_no_identity_is_refused_and_left_alone(claim: Claim, tmp_path: Path) -> None:
    path = tmp_path / "notes.pem"
    path.write_text("something else")
    with pytest.raises(IntegrityError, match=r"notes\.pem is not a peer's identity"):
        claim(path, tmp_path, "stage-0")
    assert path.read_text() == "something else"
