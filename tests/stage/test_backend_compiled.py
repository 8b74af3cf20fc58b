"""Layers that torch.compile compiles give the gradients of those that it does not."""

import dataclasses
import shutil
from typing import Literal

import pytest
import torch
from torch import nn

from swarm.config import RunConfig
from swarm.stage.boundary import HIDDEN, TOKENS
from tests.stage.backends import (
    CONFIG,
    DILOCO,
    Tensors,
    arrived,
    backend_of,
    hidden_of,
    inputs_of,
    require_near,
    story,
    sums_of,
    tokens_of,
)

# torch.compile looks at .grad of the tensors that it finds, and makes an instance of autograd.Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning"),
]


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def everything_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Compile with this backend of torch.compile; aot_eager traces what the other one makes code of. Returns a list of
    all that is compiled from now on."""
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    torch._dynamo.reset()
    compile_layer, compiled = nn.Module.compile, list[object]()
    make_code = torch._dynamo.lookup_backend(request.param)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(graph)
        return make_code(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_layer(self, backend=backend))
    return compiled


def _story(config: RunConfig, *, compiles: bool, compiled: list[object]) -> Tensors:
    """Also asserts that nothing is compiled once the stage is warm, while training waits."""
    backend = backend_of(config, 1, compiles=compiles)
    backend.warm_up()
    num_before = len(compiled)
    assert num_before or not compiles
    found = story(backend)
    # As on a GPU, where DiLoCo's anchors come from the CPU.
    anchor = {name: value.detach().clone() for name, value in backend.weights.version.parameters.items()}
    found["evaluation"] = backend.evaluate(inputs_of(9), backend.boundary_in(0), anchor)
    short = {TOKENS: tokens_of(9)[:1, :6], HIDDEN: hidden_of(9)[:1, :5]}
    found["short evaluation"] = backend.evaluate(short, backend.boundary_in(0), anchor)
    backend.budget.allow(0)
    forward = backend.forward(5, backend.weights.round.number, inputs_of(5))
    found["without room"] = arrived(forward.wire_hidden)
    found["its answer"] = arrived(backend.backward(forward, hidden_of(6), accumulate=False)[0])
    again = backend.compute_again(5, backend.weights.round.number, inputs_of(5), hidden_of(6))
    found["again"] = arrived(again.gradient)
    assert len(compiled) == num_before
    return found


@pytest.mark.parametrize(("autocast", "tolerance"), [("off", 1e-6), pytest.param("bf16", 1e-2, marks=pytest.mark.slow)])
def test_gradients_are_those_of_layers_that_are_not_compiled(
    autocast: Literal["off", "bf16"], tolerance: float, everything_compiled: list[object]
) -> None:
    # A bucket has room for two microbatches, so one is taken out of a sum.
    rounds = dataclasses.replace(DILOCO.rounds, inner_batch_samples=4)
    config = dataclasses.replace(DILOCO, rounds=rounds, model=dataclasses.replace(DILOCO.model, autocast=autocast))
    found, expected = (_story(config, compiles=compiles, compiled=everything_compiled) for compiles in (True, False))
    require_near(found, expected, tolerance)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_a_warm_up_leaves_no_trace(stage: int, wire: Literal["fp32", "fp16", "int8"]) -> None:
    config = dataclasses.replace(CONFIG, wire=dataclasses.replace(CONFIG.wire, dtype=wire))
    backend = backend_of(config, stage)
    backend.warm_up()
    assert not any(value.any() for value in sums_of([backend]).values())
    assert (backend.weights.version.number, backend.weights.version.users) == (0, 0)
    assert (backend.weights.buckets.num_samples, backend.budget.num_kept) == (0, 0)
