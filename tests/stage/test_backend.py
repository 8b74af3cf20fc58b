"""One stage's computation: forward, backward, taking out again, always with the weights that forward used."""

import contextlib
import dataclasses
import gc
import subprocess
import sys
import unittest.mock
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig
from swarm.errors import MalformedMessage
from swarm.model.masks import DropoutKey
from swarm.model.stages import build_stage
from swarm.model.transformer import build_transformer
from swarm.rpc.wire import TensorSpec
from swarm.stage.backend import Accumulated, Forward, StageBackend
from swarm.stage.boundary import GRADIENT, HIDDEN, TOKENS, reply_specs, request_specs
from swarm.stage.buckets import GradientBucket, Source
from swarm.stage.graphs import GraphBudget
from swarm.stage.settings import weights_of
from swarm.stage.staging import Download, Staging
from swarm.training import optim
from tests.support.rounding import rounding_reference

_CONFIG = RunConfig(
    model=ModelConfig(num_layers=3, d_model=32, num_heads=2, vocab_size=64),
    stages=StagesConfig(num_stages=3),
    data=DataConfig(sequence_length=16, microbatch_size=2),
    rounds=RoundsConfig(setting="synchronous", round_samples=16),
)
_DROPOUT = dataclasses.replace(_CONFIG, model=dataclasses.replace(_CONFIG.model, dropout=0.2))
_DILOCO = dataclasses.replace(_CONFIG, rounds=RoundsConfig(setting="diloco", round_samples=16, inner_batch_samples=2))
_PLENTY = 1 << 30


def _backend(config: RunConfig, stage: int, limit_bytes: int = _PLENTY) -> StageBackend:
    module = build_stage(config, stage, device="cpu")
    return StageBackend(
        config=config, stage=stage, module=module, weights=weights_of(config, module, lineage=""),
        staging=Staging(), budget=GraphBudget(limit_bytes=limit_bytes),
    )  # fmt: skip


def _chain(config: RunConfig, limit_bytes: int = _PLENTY) -> list[StageBackend]:
    return [_backend(config, stage, limit_bytes) for stage in range(config.stages.num_stages)]


def _tokens(number: int, config: RunConfig = _CONFIG) -> torch.Tensor:
    shape = (config.data.microbatch_size, config.data.sequence_length + 1)
    generator = torch.Generator().manual_seed(number)
    return torch.randint(config.model.vocab_size, shape, generator=generator, dtype=torch.int32)


def _hidden(number: int) -> torch.Tensor:
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(number))


def _arrived(download: Download | None) -> torch.Tensor:
    """The tensor of a download that must be there."""
    assert download is not None
    return download.wait()


def _run(
    chain: Sequence[StageBackend], microbatch: int, *, accumulate: bool = True, round_number: int = 0
) -> tuple[float, list[Any]]:
    """Run one microbatch through all stages; gives the loss, and what each stage accumulated."""
    inputs: dict[str, torch.Tensor] = {TOKENS: _tokens(microbatch, chain[0].config)}
    forwards = []
    for backend in chain[:-1]:
        forwards.append(backend.forward(microbatch, round_number, inputs))
        inputs = {TOKENS: inputs[TOKENS], HIDDEN: _arrived(forwards[-1].wire_hidden)}
    loss, gradient_BTD, last = chain[-1].forward_loss(microbatch, round_number, inputs, accumulate=accumulate)
    accumulated = [last]
    for backend, forward in zip(reversed(chain[:-1]), reversed(forwards), strict=True):
        gradient_BTD, entry = backend.backward(forward, _arrived(gradient_BTD), accumulate=accumulate)
        accumulated.insert(0, entry)
    return loss, accumulated


def _sums(chain: Sequence[StageBackend]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for backend in chain for name, value in backend.weights.buckets.open().sums.items()}


def _reference(config: RunConfig, microbatches: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the gradient summed over all targets, of one process."""
    model = build_transformer(config, device="cpu")
    losses = []
    for microbatch in microbatches:
        key = DropoutKey(seed=config.data.seed, microbatch=microbatch)
        loss = model.loss(_tokens(microbatch).long(), key)
        (loss * config.data.tokens_per_microbatch).backward()  # type: ignore[no-untyped-call]  # torch's
        losses.append(float(loss.detach()))
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _assert_close(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        difference = float((left[name] - right[name]).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [_CONFIG, _DROPOUT])
@pytest.mark.parametrize("limit_bytes", [_PLENTY, 0])
def test_a_chain_accumulates_the_gradient_of_one_process(config: RunConfig, limit_bytes: int) -> None:
    """Holds whether graphs are kept or computed again, and with dropout."""
    chain = _chain(config, limit_bytes)
    losses = [_run(chain, microbatch)[0] for microbatch in range(3)]
    expected_losses, expected = _reference(config, range(3))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    _assert_close(_sums(chain), expected, 1e-5)
    # The first graph of all is kept, to be measured.
    assert [backend.budget.num_recomputed for backend in chain] == ([0, 0, 0] if limit_bytes else [2, 2, 0])
    assert [backend.budget.num_kept for backend in chain] == [0, 0, 0]
    assert [backend.weights.buckets.open().num_samples for backend in chain] == [6, 6, 6]


def test_recomputing_gives_the_same_bits() -> None:
    kept, recomputed = _chain(_DROPOUT), _chain(_DROPOUT, 0)
    for microbatch in range(2):
        _run(kept, microbatch)
        _run(recomputed, microbatch)
    expected = _sums(kept)
    assert all(torch.equal(value, expected[name]) for name, value in _sums(recomputed).items())


def test_microbatches_in_any_order_do_not_mix() -> None:
    backend = _backend(_CONFIG, 1)
    forwards = [backend.forward(number, 0, {TOKENS: _tokens(number), HIDDEN: _hidden(number)}) for number in range(2)]
    assert backend.budget.num_kept == 2
    mixed = {number: backend.backward(forwards[number], _hidden(9), accumulate=False)[0] for number in (1, 0)}
    for number in range(2):
        forward = backend.forward(number, 0, {TOKENS: _tokens(number), HIDDEN: _hidden(number)})
        alone, _ = backend.backward(forward, _hidden(9), accumulate=False)
        assert torch.equal(_arrived(alone), _arrived(mixed[number]))


def test_without_accumulation_the_gradient_passes_through_and_nothing_stays() -> None:
    accumulating, passing = _chain(_CONFIG), _chain(_CONFIG)
    _run(accumulating, 0)
    loss, entries = _run(passing, 0, accumulate=False)
    assert loss == pytest.approx(_reference(_CONFIG, [0])[0][0], abs=1e-5)
    assert entries == [None, None, None]
    for backend in passing:
        assert not any(value.any() for value in backend.weights.buckets.open().sums.values())
        assert (backend.weights.buckets.open().num_tentative, backend.weights.version.users) == (0, 0)


def test_a_single_stage_is_the_whole_model() -> None:
    config = dataclasses.replace(_CONFIG, stages=StagesConfig(num_stages=1))
    backend = _backend(config, 0)
    _, gradient, entry = backend.forward_loss(0, 0, {TOKENS: _tokens(0)}, accumulate=True)
    assert gradient is None
    assert entry is not None
    _assert_close(backend.weights.buckets.open().sums, _reference(config, [0])[1], 1e-5)
    assert backend.forward_loss(0, 0, {TOKENS: _tokens(0)}, accumulate=False)[1:] == (None, None)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("limit_bytes", [_PLENTY, 0])
def test_a_smaller_type_on_the_wire_is_one_process_that_rounds_there(wire: Any, limit_bytes: int) -> None:
    """The two are exactly equal. They are also close to the result without rounding."""
    config = dataclasses.replace(_DROPOUT, wire=WireConfig(dtype=wire))
    chain = _chain(config, limit_bytes)
    losses = [_run(chain, microbatch)[0] for microbatch in range(3)]
    expected_losses, expected = rounding_reference(config, range(3))
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    unrounded = _reference(_DROPOUT, range(3))[1]
    for name, value in _sums(chain).items():
        norm = float(expected[name].norm())
        assert float((value - expected[name]).norm()) < 1e-4 * norm, name
        assert float((value - unrounded[name]).norm()) < 0.05 * norm, name
    first = "embedding.weight"
    assert float((_sums(chain)[first] - unrounded[first]).norm()) > 2e-4 * float(unrounded[first].norm()), "it rounds"


def test_fp16_loses_no_small_gradients() -> None:
    """The loss is a mean over 1,024 tokens, and hidden states are large: float16 alone would lose most gradients."""
    config = dataclasses.replace(
        _CONFIG, data=DataConfig(sequence_length=128, microbatch_size=8),
        rounds=RoundsConfig(setting="synchronous", round_samples=8), optimizer=OptimizerConfig(learning_rate=1e-3),
    )  # fmt: skip
    exact, bf16, fp16 = (_learnt(config, dtype, num_steps=8) for dtype in ("fp32", "bf16", "fp16"))
    assert float((bf16 - exact).norm()) < 0.01 * float(exact.norm())
    assert float((fp16 - exact).norm()) < 0.25 * float((bf16 - exact).norm()), "it has three bits more"


def _learnt(config: RunConfig, dtype: Any, *, num_steps: int) -> torch.Tensor:
    """How far some steps move the weights of the whole model. Its embedding is a thousand times too large."""
    chain = _chain(dataclasses.replace(config, wire=WireConfig(dtype=dtype)))
    state = chain[0].weights.state_tensors()
    state["anchor/embedding.weight"].mul_(1000)
    chain[0].weights.install(state, chain[0].weights.round)
    before = _weights(chain)
    for number in range(num_steps):
        _run(chain, number, round_number=number)
        closings = [backend.weights.close() for backend in chain]
        squared_norm = sum(optim.squared_norm(closing.tensors.values()) for closing in closings)
        for backend, closing in zip(chain, closings, strict=True):
            backend.weights.commit(
                closing.tensors, total_squared_norm=squared_norm, num_samples=closing.num_samples, num_members=1,
                lineage="",
            )  # fmt: skip
    return _weights(chain) - before


def _weights(chain: Sequence[StageBackend]) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for backend in chain for value in backend.weights.masters.values()])


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("limit_bytes", [_PLENTY, 0])
def test_a_bottleneck_is_one_process_s_too(wire: Any, limit_bytes: int) -> None:
    config = dataclasses.replace(
        _DROPOUT, model=dataclasses.replace(_DROPOUT.model, bottleneck_dim=8), wire=WireConfig(dtype=wire)
    )
    chain = _chain(config, limit_bytes)
    losses = [_run(chain, microbatch)[0] for microbatch in range(3)]
    expected_losses, expected = (_reference if wire == "fp32" else rounding_reference)(config, range(3))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    _assert_close(_sums(chain), expected, 1e-5)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_what_is_computed_again_travels_as_the_same_bytes(wire: Any) -> None:
    chain, other = (_chain(dataclasses.replace(_DROPOUT, wire=WireConfig(dtype=wire))) for _ in range(2))
    inputs = {TOKENS: _tokens(5)}
    for stage in (0, 1):
        forwards = [backends[stage].forward(5, 0, inputs) for backends in (chain, other)]
        first, again = (_arrived(forward.wire_hidden) for forward in forwards)
        assert torch.equal(first, again)
        inputs = {TOKENS: _tokens(5), HIDDEN: first}
    answers = [backend.forward_loss(5, 0, inputs, accumulate=False)[1] for backend in (chain[2], other[2], chain[2])]
    gradients = [_arrived(answer) for answer in answers]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


# -- taking out again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [_CONFIG, _DROPOUT])
def test_rolling_back_brings_the_sum_back(config: RunConfig) -> None:
    chain = _chain(config)
    _run(chain, 0)
    before = _sums(chain)
    _, entries = _run(chain, 1)
    for backend, entry in zip(chain, entries, strict=True):
        backend.roll_back([entry])
    _assert_close(_sums(chain), before, 1e-6)
    for backend in chain:
        bucket = backend.weights.buckets.open()
        assert (bucket.num_samples, bucket.num_tentative) == (2, 1)


def test_a_bucket_that_loses_all_its_gradients_is_empty_to_the_last_bit() -> None:
    backend = _backend(_CONFIG, 2)
    results = [backend.forward_loss(i, 0, {TOKENS: _tokens(i), HIDDEN: _hidden(i)}, accumulate=True) for i in range(3)]
    entries = [entry for _, _, entry in results if entry is not None]
    backend.settle(entries[0])
    bucket = backend.weights.buckets.open()
    backend.roll_back(entries)
    assert (bucket.num_tentative, backend.weights.version.users, bucket.num_samples) == (0, 0, 0)
    assert not any(bool(value.any()) for value in bucket.sums.values())


@pytest.mark.parametrize("num_staying", [1, 2])
def test_where_little_stays_that_is_computed_again(num_staying: int) -> None:
    """If others replayed nearly all that a member had, few microbatches stay, and only these are computed again."""
    chain = _chain(_DROPOUT)
    for index in range(num_staying):
        _run(chain, index)
    before = _sums(chain)
    entries = [_run(chain, index)[1] for index in range(num_staying, 5)]
    for stage, backend in enumerate(chain):
        seen: list[int] = []
        bucket, compute = backend.weights.buckets.open(), backend._again

        def again(source: Source, bucket: GradientBucket = bucket, compute: Any = compute, seen: Any = seen) -> Any:
            seen.append(bucket.num_samples)
            return compute(source)

        with unittest.mock.patch.object(backend, "_again", again):
            backend.roll_back([leaving[stage] for leaving in entries])
        assert seen == [2 * num_staying] * num_staying, "it never looks empty to another thread"
        assert (bucket.num_samples, bucket.num_tentative) == (2 * num_staying, num_staying)
        assert len(bucket.sources) == num_staying
    after = _sums(chain)
    assert all(torch.equal(after[name], before[name]) for name in before), "as if the others had never come"


def test_a_settled_gradient_can_still_be_taken_out() -> None:
    """This happens in the synchronous setting when another member counts the microbatch too."""
    backend = _backend(_CONFIG, 2)
    _, _, entry = backend.forward_loss(0, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)}, accumulate=True)
    assert entry is not None
    backend.settle(entry)
    backend.settle(entry)
    bucket = backend.weights.buckets.open()
    assert (bucket.num_tentative, backend.weights.version.users) == (0, 0)
    backend.roll_back([entry])
    assert (bucket.num_tentative, backend.weights.version.users, bucket.num_samples) == (0, 0, 0)
    assert max(float(value.abs().max()) for value in bucket.sums.values()) < 1e-6


# -- steps in between --------------------------------------------------------------------------------------------------


def _accumulate_and_settle(backend: StageBackend, microbatch: int) -> None:
    """Accumulate and settle enough for an inner step."""
    forward = backend.forward(microbatch, 0, {TOKENS: _tokens(microbatch), HIDDEN: _hidden(microbatch)})
    _, entry = backend.backward(forward, _hidden(100 + microbatch), accumulate=True)
    assert entry is not None
    backend.settle(entry)


def _middle_gradients(backend: StageBackend, parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of microbatch 7 at stage 1, input first, by plain autograd on the given weights."""
    inputs_BTD = _hidden(7).requires_grad_()
    leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    outputs_BTD = torch.func.functional_call(backend.module, leaves, (inputs_BTD,), {"dropout_key": None})
    return list(torch.autograd.grad(outputs_BTD, [inputs_BTD, *leaves.values()], _hidden(8)))


@pytest.mark.parametrize("limit_bytes", [_PLENTY, 0])
def test_backward_uses_the_weights_that_forward_used(limit_bytes: int) -> None:
    backend = _backend(_DILOCO, 1, limit_bytes)
    _accumulate_and_settle(backend, 0)
    old = {name: value.detach().clone() for name, value in backend.weights.version.parameters.items()}
    forward = backend.forward(7, 0, {TOKENS: _tokens(7), HIDDEN: _hidden(7)})
    _accumulate_and_settle(backend, 1)
    assert backend.weights.version is not forward.version, "an inner step came in between"
    answer, entry = backend.backward(forward, _hidden(8), accumulate=True)
    expected = _middle_gradients(backend, old)
    torch.testing.assert_close(_arrived(answer), expected[0], rtol=0, atol=1e-6)
    assert entry is not None
    for value, expected_value in zip(entry.bucket.sums.values(), expected[1:], strict=True):
        torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-5)
    new = _middle_gradients(backend, backend.weights.version.parameters)
    assert not torch.allclose(expected[1], new[1], rtol=1e-3), "else this test says nothing"


def test_rolling_back_after_a_step_uses_the_old_weights() -> None:
    backend = _backend(_DILOCO, 1)
    forward = backend.forward(7, 0, {TOKENS: _tokens(7), HIDDEN: _hidden(7)})
    _accumulate_and_settle(backend, 1)
    _, entry = backend.backward(forward, _hidden(8), accumulate=True)
    assert entry is not None
    assert entry.source.version is not backend.weights.version
    first = [value.clone() for value in entry.bucket.sums.values()]
    forward = backend.forward(2, 0, {TOKENS: _tokens(2), HIDDEN: _hidden(2)})
    backend.backward(forward, _hidden(9), accumulate=True)
    second = [both - one for both, one in zip(entry.bucket.sums.values(), first, strict=True)]
    backend.roll_back([entry])
    for value, expected in zip(entry.bucket.sums.values(), second, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert entry.source.version.users == 0


def test_a_step_that_needs_too_many_versions_waits_for_the_oldest_to_be_done_with() -> None:
    backend = _backend(_DILOCO, 1)
    versions = [backend.weights.version]
    forwards = []
    for number in range(2):
        forwards.append(backend.forward(7 + number, 0, {TOKENS: _tokens(7), HIDDEN: _hidden(7)}))
        _accumulate_and_settle(backend, number)
        versions.append(backend.weights.version)
    assert len(set(map(id, versions))) == 3
    _accumulate_and_settle(backend, 2)
    assert backend.weights.version is versions[-1]
    backend.release(forwards[0])
    assert backend.weights.version is not versions[-1]


def test_what_is_rolled_back_is_not_counted_as_stale() -> None:
    backend = _backend(_DILOCO, 1)
    forward = backend.forward(7, 0, {TOKENS: _tokens(7), HIDDEN: _hidden(7)})
    _accumulate_and_settle(backend, 1)
    _, entry = backend.backward(forward, _hidden(8), accumulate=True)
    assert entry is not None
    backend.roll_back([entry])
    _accumulate_and_settle(backend, 2)
    steps = backend.weights.inner_steps
    assert (steps.count, steps.microbatches, steps.staleness) == (2, 2, 0)


def test_a_released_forward_leaves_nothing() -> None:
    backend = _backend(_CONFIG, 1)
    forward = backend.forward(0, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)})
    assert (backend.budget.num_kept, backend.weights.version.users) == (1, 1)
    backend.release(forward)
    assert (backend.budget.num_kept, backend.weights.version.users) == (0, 0)


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
def test_tokens_outside_the_vocabulary_are_refused(stage: int, token: int) -> None:
    backend = _backend(_CONFIG, stage)
    tokens = _tokens(0)
    tokens[1, 3] = token
    inputs = {TOKENS: tokens, HIDDEN: _hidden(0)}
    with pytest.raises(MalformedMessage, match="outside the vocabulary of 64"):
        backend.forward_loss(0, 0, inputs, accumulate=True) if backend.is_last else backend.forward(0, 0, inputs)
    assert _unchanged(backend)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_activations_out_of_range_are_refused(stage: int, bad: float) -> None:
    backend = _backend(_CONFIG, stage)
    inputs = {TOKENS: _tokens(0), HIDDEN: _hidden(0).index_fill(1, torch.tensor([3]), bad)}
    with pytest.raises(MalformedMessage, match="'hidden' holds NaN"):
        backend.forward_loss(0, 0, inputs, accumulate=True) if backend.is_last else backend.forward(0, 0, inputs)
    assert _unchanged(backend)


def test_a_loss_that_is_not_finite_is_never_accumulated() -> None:
    backend = _backend(_CONFIG, 2)
    with torch.no_grad():
        next(iter(backend.weights.version.parameters.values())).fill_(float("nan"))
    with pytest.raises(MalformedMessage, match="'loss'"):
        backend.forward_loss(0, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)}, accumulate=True)
    assert _unchanged(backend)


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_a_gradient_that_overflows_is_never_accumulated(bad: float) -> None:
    backend = _backend(_CONFIG, 1)
    forward = backend.forward(0, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)})
    with pytest.raises(MalformedMessage, match="the gradient of the weights is not finite"):
        backend.backward(forward, torch.full_like(_hidden(0), bad), accumulate=True)
    assert _unchanged(backend)


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 5])
def test_evaluation_is_the_references_without_dropout(length: int) -> None:
    chain = _chain(_DROPOUT)
    model = build_transformer(_DROPOUT, device="cpu")
    tokens = _tokens(0)[:1, : length + 1]
    inputs = {TOKENS: tokens}
    for backend in chain:
        output = backend.evaluate(inputs, backend.weights.version.parameters)
        inputs = {TOKENS: tokens, HIDDEN: output}
    with torch.no_grad():
        assert float(output) == pytest.approx(float(model.loss(tokens.long())), abs=1e-5)


def test_evaluation_refuses_what_training_refuses() -> None:
    backend = _backend(_CONFIG, 1)
    with pytest.raises(MalformedMessage):
        backend.evaluate(
            {TOKENS: _tokens(0), HIDDEN: torch.full((2, 16, 32), float("inf"))},
            backend.weights.version.parameters,
        )


# -- memory and shapes -------------------------------------------------------------------------------------------------


def test_graphs_are_kept_as_far_as_the_budget_goes() -> None:
    backend = _backend(_CONFIG, 1)
    inputs = {TOKENS: _tokens(0), HIDDEN: _hidden(0)}
    forwards: list[Forward] = [backend.forward(0, 0, inputs)]
    graph_bytes = backend.budget.graph_bytes
    # The graph holds at least the activations of one layer, and no weights.
    assert 10 * inputs[HIDDEN].nbytes < graph_bytes < 200 * inputs[HIDDEN].nbytes
    backend.budget.limit_bytes = 2 * graph_bytes + 1
    forwards += [backend.forward(number, 0, inputs) for number in (1, 2, 3)]
    assert backend.budget.num_kept == 2
    for forward in forwards:
        backend.backward(forward, _hidden(9), accumulate=False)
    assert (backend.budget.num_kept, backend.budget.num_recomputed) == (0, 2)


def test_with_gradient_checkpointing_a_graph_is_the_layers_inputs() -> None:
    model = dataclasses.replace(_CONFIG.model, gradient_checkpointing=True)
    backend = _backend(dataclasses.replace(_CONFIG, model=model), 1)
    hidden = _hidden(0)
    forward = backend.forward(0, 0, {TOKENS: _tokens(0), HIDDEN: hidden})
    assert hidden.nbytes <= backend.budget.graph_bytes < 10 * hidden.nbytes
    backend.release(forward)


# -- bfloat16 products -------------------------------------------------------------------------------------------------


def _bf16(config: RunConfig, *, tied: bool = False, checkpointing: bool = False) -> RunConfig:
    model = dataclasses.replace(
        config.model, autocast="bf16", tied_embeddings=tied, gradient_checkpointing=checkpointing
    )
    return dataclasses.replace(config, model=model)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_casts_that_graphs_share_give_the_bits_of_casts_of_their_own(stages: int, checkpointing: bool) -> None:
    """Casts of its own are what torch.autocast makes of the float32 weights."""
    config = dataclasses.replace(
        _bf16(_DROPOUT, tied=True, checkpointing=checkpointing), stages=StagesConfig(num_stages=stages)
    )
    sums = []
    for shared in (True, False):
        with contextlib.nullcontext() if shared else _without_shared_casts():
            chain = _chain(config)
            losses = [_run(chain, microbatch)[0] for microbatch in range(2)]
        sums.append({"loss": torch.tensor(losses), **_sums(chain)})
    assert all(torch.equal(value, sums[1][name]) for name, value in sums[0].items())


def _without_shared_casts() -> Any:
    return unittest.mock.patch("swarm.stage.backend.with_shared_casts", lambda module, parameters, casts: parameters)


def test_all_graphs_of_a_version_keep_one_cast_of_its_weights() -> None:
    backend = _backend(_bf16(_CONFIG, tied=True), 2)
    saved: list[dict[int, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[-1][tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    forwards = [backend.forward(0, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)})]
    for number in (1, 2):
        saved.append({})
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            forwards.append(backend.forward(number, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(number)}))
    num_bytes = {place: tensor.untyped_storage().nbytes() for graph in saved for place, tensor in graph.items()}
    common = saved[0].keys() & saved[1].keys()
    casts = [place for place in common if saved[0][place].dtype is torch.bfloat16]
    parameters = backend.weights.version.parameters
    # The loss keeps only gradients, and not the head from which they come.
    matrices = [value for name, value in parameters.items() if value.ndim == 2 and name != "embedding.weight"]
    assert sum(num_bytes[place] for place in casts) == sum(2 * matrix.numel() for matrix in matrices)
    own_bytes = sum(num_bytes[place] for place in saved[1].keys() - common)
    assert backend.budget.graph_bytes == own_bytes, "the budget counts what each graph adds"
    for forward in forwards:
        backend.release(forward)


def test_a_new_version_is_cast_anew() -> None:
    chain = _chain(_bf16(_DILOCO))
    first = [backend.weights.version for backend in chain]
    for microbatch in range(2):
        _, entries = _run(chain, microbatch)
        for backend, entry in zip(chain, entries, strict=True):
            backend.settle(entry)
    for backend, old in zip(chain, first, strict=True):
        new = backend.weights.version
        assert new is not old
        _run(chain, 2)
        assert new.casts.keys() == old.casts.keys() != set()
        for name, cast in new.casts.items():
            assert torch.equal(cast, new.parameters[name].bfloat16())
            assert not torch.equal(cast, old.casts[name])


def test_what_is_computed_for_the_round_before_shares_casts_too() -> None:
    """Another stage may have to do that round again. Casts are let go together with the round's weights."""
    backend = _backend(_bf16(_CONFIG), 1)

    def commit() -> None:
        closing = backend.weights.close()
        backend.weights.commit(
            closing.tensors, total_squared_norm=0.0, num_samples=16, num_members=1, lineage="",
        )  # fmt: skip

    commit()
    forwards = [backend.forward(number, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)}) for number in range(2)]
    assert forwards[0].version is forwards[1].version
    assert forwards[0].version is not backend.weights.version
    assert forwards[0].version.casts
    earlier = weakref.ref(forwards[0].version)
    for forward in forwards:
        backend.release(forward)
    del forward, forwards
    commit()
    gc.collect()
    assert earlier() is None


def test_without_autocast_nothing_is_cast() -> None:
    backend = _backend(_CONFIG, 1)
    backend.release(backend.forward(0, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)}))
    assert backend.weights.version.casts == {}


# -- specs -------------------------------------------------------------------------------------------------------------


def test_specs_follow_the_configuration() -> None:
    tokens = TensorSpec(shape=(2, 17), encoding="int32")
    config = dataclasses.replace(_CONFIG, wire=WireConfig(dtype="bf16"))
    hidden = TensorSpec(shape=(2, 16, 32), encoding="bf16")
    narrow = dataclasses.replace(config, model=dataclasses.replace(_CONFIG.model, bottleneck_dim=4))
    assert request_specs(narrow, 1)[HIDDEN].shape == (2, 16, 4)
    assert request_specs(config, 0) == {TOKENS: tokens}
    assert request_specs(config, 2) == {TOKENS: tokens, HIDDEN: hidden}
    assert request_specs(config, 1, 1, 4)[HIDDEN].shape == (1, 4, 32)
    assert (reply_specs(config, 0), reply_specs(config, 1)) == ({}, {GRADIENT: hidden})
    assert reply_specs(config, -1) == {}


def test_the_answer_has_the_shapes_of_the_specs() -> None:
    backend = _backend(_CONFIG, 2)
    _, gradient, entry = backend.forward_loss(0, 0, {TOKENS: _tokens(0), HIDDEN: _hidden(0)}, accumulate=True)
    assert tuple(_arrived(gradient).shape) == reply_specs(_CONFIG, 2)[GRADIENT].shape
    assert isinstance(entry, Accumulated)


def test_neither_a_backward_nor_a_roll_back_imports_anything_large() -> None:
    """A new peer's compute thread would stand still at its first backward: sympy takes longer to import than torch."""
    program = """
import sys
from tests.stage.test_backend import _CONFIG, _chain, _run
chain = _chain(_CONFIG)
before = set(sys.modules)
assert not {"sympy", "torch._dynamo"} & before
_, accumulated = _run(chain, 0)
_run(chain, 1)
for backend, entry in zip(chain, accumulated):
    backend.roll_back([entry])
new = {name.partition(".")[0] for name in sys.modules.keys() - before} - {"einops"}
assert not new, new
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
