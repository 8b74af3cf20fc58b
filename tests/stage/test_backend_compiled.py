"""Layers that torch.compile compiles give the gradients of those that it does not."""

import dataclasses
import shutil
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

from swarm.config import RunConfig
from tests.stage.backends import CONFIG, DILOCO, Tensors, backend_of, inputs_of, require_near, story, sums_of

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


def _story(config: RunConfig, *, compiles: bool) -> Tensors:
    backend = backend_of(config, 1, compiles=compiles)
    backend.warm_up()
    found = story(backend)
    return found | {"evaluation": backend.evaluate(inputs_of(9), backend.weights.version.parameters)}


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("autocast", "tolerance"), [("off", 1e-6), pytest.param("bf16", 1e-2, marks=pytest.mark.slow)])
def test_gradients_are_those_of_layers_that_are_not_compiled(
    autocast: Literal["off", "bf16"], tolerance: float
) -> None:
    # A bucket has room for two microbatches, so one is taken out of a sum.
    rounds = dataclasses.replace(DILOCO.rounds, inner_batch_samples=4)
    config = dataclasses.replace(DILOCO, rounds=rounds, model=dataclasses.replace(DILOCO.model, autocast=autocast))
    require_near(_story(config, compiles=True), _story(config, compiles=False), tolerance)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_a_warm_up_leaves_no_trace(stage: int, wire: Literal["fp32", "fp16", "int8"]) -> None:
    config = dataclasses.replace(CONFIG, wire=dataclasses.replace(CONFIG.wire, dtype=wire))
    backend = backend_of(config, stage)
    backend.warm_up()
    assert not any(value.any() for value in sums_of([backend]).values())
    assert (backend.weights.version.number, backend.weights.version.users) == (0, 0)
    assert (backend.weights.num_unstepped_samples, backend.budget.num_kept) == (0, 0)
