"""swarm-peer's options: which values are refused."""

from pathlib import Path

import pytest

from peers.shared import logs
from peers.stage_peer import program as stage_peer
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_state import open_checkpoints


def test_the_same_command_starts_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    """The folder of --resume has to be there, unless it is also that of --checkpoint, which is made."""
    folder = tmp_path / "checkpoints"
    with pytest.raises(ValueError, match="checkpoints: there is no such folder"):
        open_checkpoints(PeerOptions(preset="tiny", resume=folder), owner="me")
    writer = open_checkpoints(PeerOptions(preset="tiny", checkpoint=folder, resume=folder), owner="me")
    assert writer is not None
    assert not writer.had_any
    (folder / "stage-0-of-3.round-10.safetensors").touch()
    writer = open_checkpoints(PeerOptions(preset="tiny", checkpoint=folder), owner="me")
    assert writer is not None
    assert writer.had_any


def test_a_ready_file_that_cannot_be_written_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "ready.json"
    monkeypatch.setattr(logs, "setup_logging", lambda *_: None)
    with pytest.raises(ValueError, match=f"^--ready-file {place}: cannot be written: Not a directory$"):
        stage_peer.main(["--initial-peers", "no address", "--ready-file", str(place)])
