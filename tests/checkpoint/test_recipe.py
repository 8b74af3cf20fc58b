"""The recipe of docs/operations.md: all stages' files as one PyTorch model."""

import re
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import cut, trained, write_cut

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def recipe(round_number: int) -> str:
    """The page's code, for files of a round."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "safe_open" in block]
    return str(code).replace("round-500", f"round-{round_number}")


def test_the_model_that_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what every stage learnt, and computes what the uncut model of the same rounds does."""
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", cut(3), 4)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(recipe(4), scope)
    model = scope["model"]
    assert isinstance(model, torch.nn.Module)
    weights = dict(model.named_parameters())
    for stage in range(3):
        for name, master in trained(cut(3), stage, 4).masters.items():
            assert torch.equal(weights.pop(name), master)
    assert not weights
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).shape[:2] == (1, 3)


def test_a_stage_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", cut(3), 1)
    next((tmp_path / "checkpoints").glob("stage-1-*")).unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="Missing key"):
        exec(recipe(1), {})
