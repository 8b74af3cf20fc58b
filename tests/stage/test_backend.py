"""One stage's computation: forward and backward, always with the weights that forward used."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch

from swarm.config import ModelConfig, RunConfig
from swarm.errors import MalformedMessage
from swarm.stage.backend import Forward, StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS
from tests.stage.backends import (
    CONFIG,
    DILOCO,
    DROPOUT,
    GPT2,
    PLENTY,
    accumulate_and_settle,
    arrived,
    backend_of,
    chain_of,
    hidden_of,
    inputs_of,
    reference_of,
    run_microbatch,
    sums_of,
    tokens_of,
)
from tests.support.chain import assert_close

# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, DROPOUT])
@pytest.mark.parametrize("limit_bytes", [PLENTY, 0])
@pytest.mark.parametrize("fused", [False, True])
def test_a_chain_accumulates_the_gradient_of_one_process(config: RunConfig, limit_bytes: int, fused: bool) -> None:
    """This holds with kept graphs and with forwards computed again, with dropout, and with the operations for a GPU."""
    chain = chain_of(config, limit_bytes, fused=fused)
    losses = [run_microbatch(chain, microbatch)[0] for microbatch in range(3)]
    expected_losses, expected = reference_of(config, range(3))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert_close(sums_of(chain), expected, 1e-5)
    # The first graph of all is kept, to be measured.
    assert [backend.budget.num_recomputed for backend in chain] == ([0, 0, 0] if limit_bytes else [2, 2, 0])
    assert [backend.budget.num_kept for backend in chain] == [0, 0, 0]
    assert [backend.weights.buckets.open().num_samples for backend in chain] == [6, 6, 6]


_QWEN3 = dataclasses.replace(CONFIG.model, num_kv_heads=1, qk_norm=True, qkv_bias=True)


@pytest.mark.parametrize("model", [CONFIG.model, _QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize(("autocast", "tolerance"), [("off", 1e-6), ("bf16", 1e-2)])
def test_operations_for_a_gpu_give_the_gradients_of_those_for_a_cpu(
    model: ModelConfig, autocast: Literal["off", "bf16"], tolerance: float
) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(model, autocast=autocast))
    lean, fused = chain_of(config), chain_of(config, fused=True)
    losses = [[run_microbatch(chain, number)[0] for number in range(2)] for chain in (lean, fused)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    expected = sums_of(lean)
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in sums_of(fused).items():
        assert float((value - expected[name]).abs().max()) < tolerance * largest, name


@pytest.mark.parametrize("fused", [False, True])
def test_recomputing_gives_the_same_bits(fused: bool) -> None:
    kept, recomputed = chain_of(DROPOUT, fused=fused), chain_of(DROPOUT, 0, fused=fused)
    for microbatch in range(2):
        run_microbatch(kept, microbatch)
        run_microbatch(recomputed, microbatch)
    expected = sums_of(kept)
    assert all(torch.equal(value, expected[name]) for name, value in sums_of(recomputed).items())


# -- steps in between --------------------------------------------------------------------------------------------------


def _middle_gradients(backend: StageBackend, parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of microbatch 7 at stage 1, input first, by plain autograd on the given weights."""
    inputs_BTD = hidden_of(7).requires_grad_()
    leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    outputs_BTD = torch.func.functional_call(backend.module, leaves, (inputs_BTD,), {"dropout_key": None})
    return list(torch.autograd.grad(outputs_BTD, [inputs_BTD, *leaves.values()], hidden_of(8)))


@pytest.mark.parametrize("limit_bytes", [PLENTY, 0])
def test_backward_uses_the_weights_that_forward_used(limit_bytes: int) -> None:
    backend = backend_of(DILOCO, 1, limit_bytes)
    accumulate_and_settle(backend, 0)
    old = {name: value.detach().clone() for name, value in backend.weights.version.parameters.items()}
    forward = backend.forward(7, 0, inputs_of(7))
    accumulate_and_settle(backend, 1)
    assert backend.weights.version is not forward.inputs.version, "an inner step came in between"
    answer, entry = backend.backward(forward, hidden_of(8), accumulate=True)
    expected = _middle_gradients(backend, old)
    torch.testing.assert_close(arrived(answer), expected[0], rtol=0, atol=1e-6)
    assert entry is not None
    for value, expected_value in zip(entry.bucket.sums.values(), expected[1:], strict=True):
        torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-5)
    new = _middle_gradients(backend, backend.weights.version.parameters)
    assert not torch.allclose(expected[1], new[1], rtol=1e-3), "else this test says nothing"


# -- refusing ----------------------------------------------------------------------------------------------------------


def _unchanged(backend: StageBackend) -> bool:
    weights = backend.weights
    untouched = not any(bool(value.any()) for value in weights.buckets.open().sums.values())
    return untouched and (weights.version.users, weights.buckets.open().num_samples, backend.budget.num_kept) == (
        0,
        0,
        0,
    )


@pytest.mark.parametrize("token", [-1, 64])
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_tokens_outside_the_vocabulary_are_refused(stage: int, token: int) -> None:
    backend = backend_of(CONFIG, stage)
    tokens = tokens_of(0)
    tokens[1, 3] = token
    inputs = {TOKENS: tokens, HIDDEN: hidden_of(0)}
    with pytest.raises(MalformedMessage, match="outside the vocabulary of 64"):
        await backend.function.checked(inputs, backend.function.boundary)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), 1e30])
@pytest.mark.parametrize("repeats", [1, 600])
async def test_activations_out_of_range_are_refused(stage: int, bad: float, repeats: int) -> None:
    """What has many bytes is checked in another thread."""
    hidden = hidden_of(0).repeat(repeats, 1, 1)
    inputs = {TOKENS: tokens_of(0), HIDDEN: hidden.index_fill(1, torch.tensor([3]), bad)}
    function = backend_of(CONFIG, stage).function
    await function.checked({**inputs, HIDDEN: hidden}, function.boundary)
    with pytest.raises(MalformedMessage, match="'hidden' holds NaN"):
        await function.checked(inputs, function.boundary)


def test_a_loss_that_is_not_finite_is_never_accumulated() -> None:
    backend = backend_of(CONFIG, 2)
    with torch.no_grad():
        next(iter(backend.weights.version.parameters.values())).fill_(float("nan"))
    with pytest.raises(MalformedMessage, match="'loss'"):
        backend.forward_loss(0, 0, inputs_of(0), accumulate=True)
    assert _unchanged(backend)


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_a_gradient_that_overflows_is_never_accumulated(bad: float) -> None:
    backend = backend_of(CONFIG, 1)
    forward = backend.forward(0, 0, inputs_of(0))
    with pytest.raises(MalformedMessage, match="the gradient of the weights is not finite"):
        backend.backward(forward, torch.full_like(hidden_of(0), bad), accumulate=True)
    assert _unchanged(backend)


# -- memory and shapes -------------------------------------------------------------------------------------------------


def test_graphs_are_kept_as_far_as_the_budget_goes() -> None:
    backend = backend_of(CONFIG, 1)
    inputs = inputs_of(0)
    forwards: list[Forward] = [backend.forward(0, 0, inputs)]
    graph_bytes = backend.budget.graph_bytes
    # The graph holds at least the activations of one layer, and no weights.
    assert 10 * inputs[HIDDEN].nbytes < graph_bytes < 200 * inputs[HIDDEN].nbytes
    backend.budget.limit_bytes = 2 * graph_bytes + 1
    forwards += [backend.forward(number, 0, inputs) for number in (1, 2, 3)]
    assert backend.budget.num_kept == 2
    for forward in forwards:
        backend.backward(forward, hidden_of(9), accumulate=False)
    assert (backend.budget.num_kept, backend.budget.num_recomputed) == (0, 2)


def test_with_gradient_checkpointing_a_graph_is_the_layers_inputs() -> None:
    model = dataclasses.replace(CONFIG.model, gradient_checkpointing=True)
    backend = backend_of(dataclasses.replace(CONFIG, model=model), 1)
    hidden = hidden_of(0)
    forward = backend.forward(0, 0, {TOKENS: tokens_of(0), HIDDEN: hidden})
    assert hidden.nbytes <= backend.budget.graph_bytes < 10 * hidden.nbytes
    backend.release(forward)


@pytest.mark.parametrize(
    "model",
    [{}, {"autocast": "fp16"}, {"autocast": "bf16"}, {"versions": "bf16"}],
    ids=["fp32", "fp16", "bf16", "bf16 versions"],
)
def test_sketches_are_of_what_joins_the_sum_and_come_out_alike_again(model: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **model))
    backend = backend_of(config, 2)
    sums_N = torch.zeros(())
    for number in range(3):
        _, _, accumulated = backend.forward_loss(number, 0, inputs_of(number), accumulate=True)
        assert accumulated is not None
        sums_N = sums_N + accumulated.sketch.wait()
        assert backend.weights.sketch is not None
        assert torch.allclose(backend.weights.sketch.of(backend.weights.buckets.open().sums), sums_N, atol=1e-3)
        again_N = backend.compute_again(number, 0, inputs_of(number), None).sketch.wait()
        assert torch.allclose(again_N, accumulated.sketch.wait(), atol=1e-3)
    assert float(sums_N.norm()) > 1.0
    assert backend.weights.buckets.num_samples == 6, "what is computed again joins no sum"
    assert backend.budget.num_kept == 0
