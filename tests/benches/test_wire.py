"""The wire bench: that its chain trains as one process does, and what its figures mean."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.reference import Reference
from scripts.benches.sides.wire_chain import WireChain
from scripts.benches.wire import ARMS, Options, run_config, summary
from swarm.stage.boundary import GRADIENT, HIDDEN, TOKENS


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """A small text of its own."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} bottles\n" for number in range(3000)))
    return Options(dataset=str(path), steps=2, d_model=64)


@pytest.mark.parametrize("arm", ["fp32", "bottleneck"])
def test_the_chain_is_the_single_process(arm: str, options: Options) -> None:
    config, data = with_corpus(run_config(arm, 1, options))
    chain, reference = WireChain(config, data), Reference(config, data)
    for number in range(2):
        assert chain.step(number) == pytest.approx(reference.step(number), abs=1e-5)
    trained = {name: weight for stage in chain.stages for name, weight in stage.weights.masters.items()}
    for name, weight in reference.weights.items():
        torch.testing.assert_close(trained[name].detach(), weight, rtol=0, atol=1e-4)


def test_a_nudge_is_small_and_felt(options: Options) -> None:
    config, data = with_corpus(run_config("fp32-nudged", 0, options))
    nudged, other = WireChain(config, data, nudge=ARMS["fp32-nudged"].nudge), WireChain(config, data)
    assert nudged.step(0) == pytest.approx(other.step(0), abs=1e-5)
    pairs = zip(nudged.stages[0].weights.masters.values(), other.stages[0].weights.masters.values(), strict=True)
    assert any(not torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("arm", ARMS)
def test_bytes_are_those_of_the_messages(arm: str, options: Options) -> None:
    config, data = with_corpus(run_config(arm, 0, options))
    chain = WireChain(config, data)
    chain.step(0)
    numbers = 8 * 64 * (64 // 16 if ARMS[arm].is_narrow else 64)
    num_bytes = {"fp32": 4 * numbers, "bf16": 2 * numbers, "int8": numbers // 128 * 130}[ARMS[arm].dtype]
    assert chain.sent_bytes == {TOKENS: 2 * 4 * 8 * 65, HIDDEN: 2 * num_bytes, GRADIENT: 2 * num_bytes}


def _figures(loss: float, num_bytes: int) -> dict[str, Any]:
    sizes = {"hidden_bytes": num_bytes, "gradient_bytes": num_bytes, "token_bytes": 10}
    return {"val_loss": loss, **sizes, "cpu_seconds": 1.0}


def test_differences_are_taken_seed_by_seed() -> None:
    found = summary({"fp32": [_figures(2.0, 95), _figures(4.0, 95)], "int8": [_figures(2.02, 20), _figures(4.0, 20)]})
    assert found["int8"]["loss_difference"] == pytest.approx(0.005)
    assert found["int8"]["loss_difference_std"] == pytest.approx(0.01 / 2**0.5)
    assert (found["int8"]["bytes_ratio"], found["int8"]["bytes_ratio_with_tokens"]) == (4.75, 4.0)
    assert found["fp32"]["loss_difference"] == 0.0


@pytest.mark.parametrize(("loss", "reached"), [(2.009, True), (2.011, False)])
def test_the_goal_is_half_a_per_cent(loss: float, reached: bool) -> None:
    assert summary({"fp32": [_figures(2.0, 95)], "int8": [_figures(loss, 20)]})["int8"]["reached"] is reached


@pytest.mark.parametrize("changes", [{"arms": ("int4",)}, {"seeds": 0}, {"d_model": 100}])
def test_what_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        Options(**changes)
