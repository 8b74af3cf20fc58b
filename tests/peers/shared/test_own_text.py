"""The text of a run that this process begins, and how much of it there is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.doctor import fit
from peers.doctor.options import DoctorOptions
from peers.shared.named_model import open_model
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_model import own_config
from peers.static import run_config
from peers.static.options import StaticOptions
from peers.static.workers import Shape
from swarm.config import RunConfig
from tests.interchange.small_models import save
from tests.support.chat_model import save_chat_model


def _begun(model: Path, dataset: Path, *settings: str, **options: Any) -> RunConfig:
    given = PeerOptions(model=str(model), dataset=(str(dataset),), set=settings, **options)
    config = own_config(given, None, model.parent / "cache", model=open_model(str(model)))
    assert config is not None
    return config


def _sizes(config: RunConfig) -> tuple[int, int, int, int]:
    data, rounds = config.data, config.rounds
    return data.sequence_length, data.microbatch_size, rounds.inner_batch_samples, rounds.round_samples


@pytest.mark.parametrize(
    ("num_bytes", "settings", "expected", "steps"),
    [
        # The model takes 64 tokens.
        (1_000_000, (), (64, 4, 16, 256), "59.8"),
        (16_000, (), (64, 2, 8, 32), "7.66"),
        (16_000, ("data.microbatch_size=1", "rounds.round_samples=8"), (64, 1, 8, 8), "30.6"),
    ],
)
def test_a_run_that_begins_with_a_model_has_sizes_that_fit_its_text(
    num_bytes: int, settings: tuple[str, ...], expected: tuple[int, ...], steps: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    save("llama-2", tmp_path / "model")
    (tmp_path / "text.txt").write_text("x" * num_bytes)
    caplog.set_level("INFO")
    config = _begun(tmp_path / "model", tmp_path / "text.txt", *settings, steps=10)
    assert _sizes(config) == expected
    assert config.optimizer.total_samples == 10 * config.rounds.round_samples
    (line,) = [line for line in caplog.messages if line.startswith("a step is a round of ")]
    assert line.endswith(f"; {steps} steps are one pass through the text")


@pytest.mark.parametrize(
    ("num_talks", "packing", "expected"),
    [(20, "true", (64, 1, 4, 16))],
)
def test_conversations_are_as_long_as_they_need_to_be(
    num_talks: int, packing: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    model = save_chat_model(tmp_path / "model")
    messages = [{"role": role, "content": "word1 word2"} for role in ("user", "assistant")]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * num_talks)
    settings = ("data.format=chat", f"data.packing={packing}")
    assert _sizes(_begun(model, tmp_path / "talks.jsonl", *settings)) == expected


@pytest.mark.parametrize("num_bytes", [4000])
def test_static_training_and_a_plan_have_the_sizes_of_a_swarm_on_the_same_text(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, text = tmp_path / "model", tmp_path / "text.txt"
    save("llama-2", model)
    text.write_text("x" * num_bytes)
    settings = ("rounds.setting=synchronous",)
    expected = _sizes(_begun(model, text, *settings))
    options = StaticOptions(model=str(model), dataset=(str(text),), set=settings, pp=2)
    static, _ = run_config.trained(options, Shape(dp=1, tp=1, pp=2), torch.device("cpu"))
    assert _sizes(static) == expected
    plan = fit.planned(DoctorOptions(model=str(model), set=(*settings, f"data.dataset={json.dumps(str(text))}")))
    assert _sizes(plan) == expected
