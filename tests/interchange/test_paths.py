"""The models of a run's paths, from checkpoints of its blocks."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peers.model import program as model
from swarm.config import RunConfig
from swarm.data import path_router
from swarm.data.path_router import PathRouter
from swarm.errors import IntegrityError
from swarm.interchange import origin
from swarm.model.stages import build_stage
from tests.checkpoint.states import CONFIG, trained, with_paths, write_block, write_cut

TOKENS_BT = torch.tensor([[5, 3, 200, 17, 9, 31]])


def _config(folder: Path, **more: object) -> RunConfig:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=256))
    folder.mkdir()
    return with_paths(config, **more)  # type: ignore[arg-type]


@torch.no_grad()
def _logits_of_blocks(config: RunConfig, path: int, num_rounds: int) -> torch.Tensor:
    """What the path's blocks compute one after another, as the swarm does."""
    hidden = TOKENS_BT
    for block in config.blocks_of(path):
        module = build_stage(config, block.stage, device="cpu")
        masters = trained(config, block.stage, num_rounds, block.variant).masters
        hidden = torch.func.functional_call(module, dict(masters), (hidden,))
    return hidden


def test_each_path_is_exported_as_a_model_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path / "checkpoints")
    write_cut(tmp_path / "checkpoints", config, num_rounds=2)
    router = PathRouter(weights_PF=torch.randn(4, 8), biases_P=torch.zeros(4), tokenizer="bytes")
    (tmp_path / "shards").mkdir()
    router.write(tmp_path / "shards")
    source = ["export", "--checkpoint", str(tmp_path / "checkpoints"), "--output"]
    assert model.main([*source, str(tmp_path / "all"), "--router", str(tmp_path / "shards")]) == 0
    told = capsys.readouterr().out
    for path in range(4):
        folder = tmp_path / "all" / f"path-0{path}"
        assert f"{folder}: round 2 of the run" in told
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = theirs(TOKENS_BT).logits
        assert (logits - _logits_of_blocks(config, path, 2)).abs().max() < 1e-4
        others = [other for other in range(4) if other != path]
        assert all((logits - _logits_of_blocks(config, other, 2)).abs().max() > 1e-3 for other in others)
    assert torch.equal(path_router.read(tmp_path / "all").weights_PF, router.weights_PF)
    assert model.main([*source, str(tmp_path / "one"), "--path", "2"]) == 0
    weights = [folder / "model.safetensors" for folder in (tmp_path / "one", tmp_path / "all" / "path-02")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert model.main(["show", str(tmp_path / "checkpoints")]) == 0
    assert "4, of 5 blocks" in capsys.readouterr().out


def test_a_path_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = _config(tmp_path / "checkpoints")
    write_cut(tmp_path / "checkpoints", config, num_rounds=1)
    source = ["export", "--checkpoint", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="--path 4: the run has 4 paths, numbered from 0"):
        model.main([*source, "--path", "4"])
    PathRouter(weights_PF=torch.zeros(3, 8), biases_P=torch.zeros(3), tokenizer="bytes").write(tmp_path)
    with pytest.raises(ValueError, match="chooses among 3 paths, and the run has 4"):
        model.main([*source, "--router", str(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_a_path_that_stood_still_is_put_together_of_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own block is at an earlier round than those that other paths trained on; synchronous blocks never are."""
    config = _config(tmp_path / "checkpoints", setting="diloco")
    for block in config.blocks:
        write_block(tmp_path / "checkpoints", config, block, 1 if block.variant == 1 and block.stage == 0 else 3)
    found = origin.from_checkpoints(tmp_path / "checkpoints", None, path=2)
    assert "no round has all of path 2: its stages are taken at their newest rounds, 1, 3, 3" in caplog.text
    for block, num_rounds in zip(config.blocks_of(2), (1, 3, 3), strict=True):
        masters = trained(config, block.stage, num_rounds, block.variant).masters
        assert all(torch.equal(found.load({name})[name], master) for name, master in masters.items())
    assert origin.from_checkpoints(tmp_path / "checkpoints", None, path=1).card.round == 3
    exact = _config(tmp_path / "exact")
    for block in exact.blocks:
        write_block(tmp_path / "exact", exact, block, 1 if block.variant == 1 and block.stage == 0 else 3)
    with pytest.raises(IntegrityError, match="no sound checkpoints with all of the model"):
        origin.from_checkpoints(tmp_path / "exact", None, path=2)
