"""Products in float16: each stage scales its gradients, computes again what overflows, and takes the scale out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from torch import nn

from swarm.config import OptimizerConfig, RoundsConfig, RunConfig
from swarm.errors import MalformedMessage
from swarm.stage.backend import StageBackend
from tests.stage.backends import (
    CONFIG,
    arrived,
    backend_of,
    chain_of,
    hidden_of,
    inputs_of,
    run_microbatch,
    sums_of,
)
from tests.support.commits import end_rounds

Autocast = Literal["off", "bf16", "fp16"]
OVERFLOWS = "overflows float16: computed again with half the scale"


def _in(autocast: Autocast, config: RunConfig = CONFIG) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, autocast=autocast))


def _error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest


def _gradient(backend: StageBackend, microbatch: int, magnitude: float, *, accumulate: bool = True) -> torch.Tensor:
    """Run a microbatch through a stage in the middle, with a gradient of this magnitude. Returns what it answers."""
    forward = backend.forward(microbatch, 0, inputs_of(microbatch))
    answer, _ = backend.backward(forward, hidden_of(100 + microbatch) * magnitude, accumulate=accumulate)
    return arrived(answer)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_float32_and_nearer_than_bfloat16_s(fused: bool) -> None:
    sums = {}
    for autocast in ("off", "bf16", "fp16"):
        chain = chain_of(_in(autocast), fused=fused)
        for microbatch in range(2):
            run_microbatch(chain, microbatch)
        sums[autocast] = sums_of(chain)
    assert 0.0 < _error(sums["fp16"], sums["off"]) < 2e-3
    assert _error(sums["fp16"], sums["off"]) < _error(sums["bf16"], sums["off"])


@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 200.0])
def test_what_vanishes_or_overflows_in_float16_has_its_gradient(
    magnitude: float, caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = backend_of(_in("fp16"), 1), backend_of(CONFIG, 1)
    with caplog.at_level("INFO"):
        answers = [_gradient(backend, 0, magnitude) for backend in (found, expected)]
    assert (OVERFLOWS in caplog.text) == (magnitude > 1.0)
    assert _error(sums_of([found]), sums_of([expected])) < 1e-2
    assert _error({"answer": answers[0]}, {"answer": answers[1]}) < 1e-2


def test_an_overflow_of_the_last_stage_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    sums = []
    for autocast in ("fp16", "off"):
        backend = backend_of(_in(autocast), 2)
        with torch.no_grad():
            # The gradient of a hidden state goes through the head's matrix.
            backend.weights.version.parameters["head.output.weight"].mul_(30_000.0)
        inputs = inputs_of(0)
        with caplog.at_level("INFO"):
            loss, gradient, _ = backend.forward_loss(0, 0, inputs, accumulate=True)
        sums.append({**sums_of([backend]), "answer": arrived(gradient)})
        assert loss > 0.0
    assert OVERFLOWS in caplog.text
    assert _error(sums[0], sums[1]) < 1e-2


def test_what_is_rolled_back_is_computed_with_the_scale_that_it_had() -> None:
    """The tiny gradient would be a coarse one with the scale that the large one leaves behind."""
    backend, tiny = backend_of(_in("fp16"), 1), 1e-5
    forward = backend.forward(0, 0, inputs_of(0))
    _, leaving = backend.backward(forward, hidden_of(100) * tiny, accumulate=True)
    assert leaving is not None
    before = sums_of([backend])
    _gradient(backend, 1, 200.0, accumulate=False)
    _gradient(backend, 2, tiny)
    second = {name: value - before[name] for name, value in sums_of([backend]).items()}
    backend.roll_back([leaving])
    assert _error(sums_of([backend]), second) < 1e-5


def test_a_gradient_that_no_scale_mends_is_refused_and_spoils_no_other() -> None:
    backend, fresh = backend_of(_in("fp16"), 1), backend_of(_in("fp16"), 1)
    with pytest.raises(MalformedMessage, match="the gradient is not finite, whatever its scale"):
        _gradient(backend, 0, float("nan"))
    for each in (backend, fresh):
        _gradient(each, 1, 1e-5)
    assert all(torch.equal(value, sums_of([fresh])[name]) for name, value in sums_of([backend]).items())
    assert backend.budget.num_kept == 0


# torch.compile makes an instance of autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_of_mixed_types_and_a_compiled_peer_learns_as_one_in_bfloat16(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiles:
        torch._dynamo.reset()
    compile_layer: Callable[..., None] = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_layer(self, backend="aot_eager"))
    config = dataclasses.replace(
        CONFIG,
        rounds=RoundsConfig(setting="synchronous", round_samples=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_samples=0),
    )
    bf16 = _losses([chain_of(_in("bf16", config)), chain_of(_in("bf16", config))])
    mixed = [backend_of(_in("off", config), 0), backend_of(_in("bf16", config), 1, compiles=compiles)]
    mixed.append(backend_of(_in("fp16", config), 2))
    found = _losses([mixed, [backend_of(_in("fp16", config), stage) for stage in range(3)]])
    assert bf16[-1] < bf16[0] - 0.5
    assert found == pytest.approx(bf16, abs=1e-3)


def _losses(chains: Sequence[Sequence[StageBackend]]) -> list[float]:
    """The mean losses of 30 rounds, in which each replica has one of two microbatches that are always the same."""
    losses = []
    for number in range(30):
        results = [run_microbatch(chain, place, round_number=number) for place, chain in enumerate(chains)]
        losses.append(sum(loss for loss, _ in results) / len(results))
        for chain, (_, entries) in zip(chains, results, strict=True):
            for backend, entry in zip(chain, entries, strict=True):
                backend.settle(entry)
        averages = []
        for replicas in zip(*chains, strict=True):
            ours, theirs = (replica.weights.contribute().tensors for replica in replicas)
            averages.append({name: (value + theirs[name]) / 2 for name, value in ours.items()})
        for chain in chains:
            end_rounds([backend.weights for backend in chain], averages, num_samples=4, num_members=2)
    return losses
