"""swarm-generate of a run with several paths: one that is named, or the one that a router chooses."""

import dataclasses
from pathlib import Path

import pytest
import torch

from peers.generate import program
from peers.model import program as model
from swarm.data.path_router import PathRouter, hashed
from tests.checkpoint.states import CONFIG, with_paths, write_cut

GREEDY = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=256))
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", with_paths(config), num_rounds=3)
    return tmp_path / "checkpoints"


def _written(capsys: pytest.CaptureFixture[str], prompt: str, *arguments: str) -> str:
    assert program.main(["--prompt", prompt, *GREEDY, *arguments]) == 0
    return capsys.readouterr().out


def _router(folder: Path, num_paths: int = 4, tokenizer: str = "bytes") -> str:
    """A router that sends what begins with `a` along path 1, and with `b` along path 3."""
    weights_PF = torch.zeros(num_paths, len(hashed([0])))
    weights_PF[1], weights_PF[-1] = hashed([ord("a")]), hashed([ord("b")])
    folder.mkdir(exist_ok=True)
    PathRouter(weights_PF=weights_PF, biases_P=torch.zeros(num_paths), tokenizer=tokenizer).write(folder)
    return str(folder)


def test_a_path_that_is_named_writes(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ("--checkpoint", str(checkpoints))
    texts = [_written(capsys, "a", *source, "--path", str(path)) for path in range(4)]
    assert len(set(texts)) > 1, "they have learnt different things"
    assert program.main(["--prompt", "a", *GREEDY, *source]) == 0
    said = capsys.readouterr()
    assert said.out == texts[0]
    assert "the run has 4 paths, and path 0 writes: --path N or --router DIR chooses another" in said.err


def test_the_beginning_of_a_prompt_chooses_the_path(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, router = ("--checkpoint", str(checkpoints)), _router(tmp_path / "shards")
    for prompt, path in (("a", 1), ("b", 3)):
        assert _written(capsys, prompt, *source, "--router", router) == _written(
            capsys, prompt, *source, "--path", str(path)
        )
    assert model.main(["export", *source, "--output", str(tmp_path / "out"), "--router", router]) == 0
    capsys.readouterr()
    out = str(tmp_path / "out")
    for prompt, path, more in (("a", 1, ()), ("b", 3, ("--reroute-every", "32"))):
        alone = _written(capsys, prompt, "--model", f"{out}/path-0{path}")
        assert _written(capsys, prompt, "--model", out, "--router", out, *more) == alone
