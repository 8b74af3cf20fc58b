"""swarm-peer's options: which values are refused."""

from pathlib import Path
from typing import Any

import pytest

from peers.shared import logs
from peers.shared.option_types import StageChoice
from peers.stage_peer import program as stage_peer
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_model import require_blocks
from peers.stage_peer.own_state import open_checkpoints
from peers.status.view import Joining
from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.rpc.entry import Entry


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


def test_whose_code_runs_here_is_for_the_user_to_say() -> None:
    run = RunConfig(model=ModelConfig(custom_class="theirs:Model"))
    require_blocks(_joining(), RunConfig(), None)
    require_blocks(_joining("theirs:Model"), RunConfig(), None)
    require_blocks(_joining(), run, run)
    require_blocks(_joining("theirs:Model"), run, None)
    for allowed in ((), ("",), ("theirs",), ("ours:Model",)):
        with pytest.raises(ValueError, match=r"if you trust that code, add --allow-class theirs:Model$"):
            require_blocks(_joining(*allowed), run, None)


def _joining(*allowed: str, **options: Any) -> PeerOptions:
    return PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/x",), allow_class=allowed, **options)


def test_a_peer_that_stays_on_one_path_runs_no_code_of_the_others() -> None:
    run = RunConfig(
        model=ModelConfig(num_layers=3, custom_class=(("one:A", "", "one:A"), ("two:B", "", "two:C"))),
        stages=StagesConfig(num_stages=3, variants=(2, 1, 2), paths=((0, 0, 0), (1, 0, 1))),
    )
    require_blocks(_joining("one:A", path=0), run, None)
    require_blocks(_joining(stage=StageChoice(1, 1)), run, None)
    missing = r"run 'two:B', 'two:C', its model.custom_class: .* add --allow-class two:B --allow-class two:C$"
    for everywhere in ({"stage": "auto"}, {"path": 1}):
        with pytest.raises(ValueError, match=missing):
            require_blocks(_joining("one:A", **everywhere), run, None)
    joining = Joining.at(run, [Entry.parse(f"{40 * 'a'}@192.0.2.1:5001")], insecure=False)
    assert joining.peer.endswith(" --allow-class one:A --allow-class two:B --allow-class two:C")


def test_what_is_to_be_typed_is_one_word_to_a_shell() -> None:
    run = RunConfig(model=ModelConfig(custom_class="a:B; rm -rf ~"))
    with pytest.raises(ValueError, match=r"add --allow-class 'a:B; rm -rf ~'$"):
        require_blocks(_joining(), run, None)


def test_a_ready_file_that_cannot_be_written_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "ready.json"
    monkeypatch.setattr(logs, "setup_logging", lambda *_: None)
    with pytest.raises(ValueError, match=f"^--ready-file {place}: cannot be written: Not a directory$"):
        stage_peer.main(["--initial-peers", "no address", "--ready-file", str(place)])
