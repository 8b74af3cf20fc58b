"""swarm-peer's options: which values are refused."""

from pathlib import Path
from typing import Any

import pytest

from peers.shared import logs
from peers.stage_peer import program as stage_peer
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_model import own_config, require_allowed_class
from peers.stage_peer.own_state import open_checkpoints
from swarm.config import LoraConfig, ModelConfig, RunConfig
from tests.support.swarm import write_text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rebalance_every": 60.0}, "--rebalance-every needs --stage auto"),
        ({"stage": 1, "rebalance_every": 0.0}, "--rebalance-every needs --stage auto"),
        ({"resume_round": 10}, "--resume-round needs --resume DIR"),
        ({"host": "nosuch"}, "--host nosuch is no IP address of this machine: it takes an address, not a name"),
    ],
)
def test_wrong_options(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PeerOptions(preset="tiny", **options)  # type: ignore[arg-type]  # any of them


def test_adapters_of_a_new_run_may_be_named_on_the_command_line(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")

    def configured(**options: Any) -> LoraConfig:
        found = own_config(PeerOptions(preset="tiny", dataset=(str(text),), **options), None, tmp_path / "cache")
        assert found is not None
        return found.lora

    assert configured(lora_rank=4, lora_alpha=8.0, lora_dropout=0.1, lora_targets=("q_proj",)) == LoraConfig(
        rank=4, alpha=8.0, dropout=0.1, targets=("q_proj",)
    )
    assert not configured(lora_rank=0).is_on
    with pytest.raises(ValueError, match="need a --lora-rank above 0"):
        configured(lora_alpha=8.0)
    with pytest.raises(ValueError, match="this model has no 'wq'"):
        configured(lora_rank=4, lora_targets=("wq",))
    with pytest.raises(ValueError, match="--lora-rank and the like belong to a new run"):
        PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/x",), lora_rank=4)


def test_any_setting_of_a_new_run_may_be_on_the_command_line(tmp_path: Path) -> None:
    settings = ("optimizer.learning_rate=1e-5", f"data.dataset={write_text(tmp_path / 'text.txt')}", "lora.rank=2")
    found = own_config(PeerOptions(preset="tiny", set=settings, lora_rank=4), None, tmp_path / "cache")
    assert found is not None
    assert (found.optimizer.learning_rate, found.lora.rank) == (1e-5, 4)
    assert found.data.dataset == str(tmp_path / "text.txt")
    with pytest.raises(ValueError, match="--set belong to a new run"):
        PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/x",), set=settings)


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
    require_allowed_class(RunConfig(), None, None)
    require_allowed_class(RunConfig(), None, "theirs:Model")
    require_allowed_class(run, run, None)
    require_allowed_class(run, None, "theirs:Model")
    for allowed in (None, "", "theirs", "ours:Model"):
        with pytest.raises(ValueError, match=r"if you trust that code, add --allow-class theirs:Model$"):
            require_allowed_class(run, None, allowed)


def test_what_is_to_be_typed_is_one_word_to_a_shell() -> None:
    run = RunConfig(model=ModelConfig(custom_class="a:B; rm -rf ~"))
    with pytest.raises(ValueError, match=r"add --allow-class 'a:B; rm -rf ~'$"):
        require_allowed_class(run, None, None)


def test_a_ready_file_that_cannot_be_written_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "ready.json"
    monkeypatch.setattr(logs, "setup_logging", lambda *_: None)
    with pytest.raises(ValueError, match=f"^--ready-file {place}: cannot be written: Not a directory$"):
        stage_peer.main(["--initial-peers", "no address", "--ready-file", str(place)])


def test_a_host_of_another_machine_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "setup_logging", lambda *_: None)
    with pytest.raises(ValueError, match=r"^--host 192\.0\.2\.1 is no IP address of this machine: Cannot assign"):
        stage_peer.main(["--initial-peers", "no address", "--host", "192.0.2.1"])
