"""Layers that torch.compile compiles give the gradients of those that it does not."""

import dataclasses
import shutil
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

from swarm.config import RunConfig
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS
from tests.stage.backends import CONFIG, DILOCO, accumulate_and_settle, arrived, backend_of, hidden_of, tokens_of

Tensors = dict[str, torch.Tensor]

# torch.compile looks at .grad of the tensors that it finds, and makes an instance of autograd.Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning"),
]


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def _compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with this backend of torch.compile; aot_eager traces what the other one makes code of."""
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    torch._dynamo.reset()
    compile_layer: Callable[..., None] = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_layer(self, backend=request.param))


def _inputs(number: int) -> Tensors:
    return {TOKENS: tokens_of(number), HIDDEN: hidden_of(number)}


def _sums(backend: StageBackend) -> Tensors:
    return {name: value.clone() for name, value in backend.weights.buckets.open().sums.items()}


def _story(config: RunConfig, stage: int, *, compiles: bool) -> Tensors:
    """Two microbatches in flight with a step between them, of which one is rolled back, and an evaluation."""
    backend = backend_of(config, stage, compiles=compiles)
    backend.warm_up()
    first = backend.forward(7, 0, _inputs(7))
    accumulate_and_settle(backend, 1)
    second = backend.forward(8, 0, _inputs(8))
    assert second.version is not first.version
    answer, leaving = backend.backward(first, hidden_of(70), accumulate=True)
    assert leaving is not None
    found = {f"first.{name}": value for name, value in _sums(backend).items()} | {"answer": arrived(answer)}
    backend.backward(second, hidden_of(80), accumulate=True)
    found |= {f"both.{name}": value for name, value in leaving.bucket.sums.items()}
    found = {name: value.clone() for name, value in found.items()}
    backend.roll_back([leaving])
    found |= {f"second.{name}": value.clone() for name, value in leaving.bucket.sums.items()}
    return found | {"hidden": backend.evaluate(_inputs(9), backend.weights.version.parameters)}


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("autocast", "tolerance"), [("off", 1e-6), ("bf16", 1e-2)])
def test_gradients_are_those_of_layers_that_are_not_compiled(
    autocast: Literal["off", "bf16"], tolerance: float
) -> None:
    # A bucket has room for both microbatches, so the first is taken out of a sum.
    config = dataclasses.replace(DILOCO, model=dataclasses.replace(DILOCO.model, autocast=autocast))
    plain, compiled = (_story(config, 1, compiles=compiles) for compiles in (False, True))
    for name, expected in plain.items():
        largest = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(compiled[name], expected, rtol=0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_a_warm_up_leaves_no_trace(stage: int, wire: Literal["fp32", "fp16", "int8"]) -> None:
    config = dataclasses.replace(CONFIG, wire=dataclasses.replace(CONFIG.wire, dtype=wire))
    backend = backend_of(config, stage)
    backend.warm_up()
    assert not any(value.any() for value in _sums(backend).values())
    assert (backend.weights.version.number, backend.weights.version.users) == (0, 0)
    assert (backend.weights.num_unstepped_samples, backend.budget.num_kept) == (0, 0)
