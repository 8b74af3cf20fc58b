"""Smaller types and fewer channels on the wire: the numbers are those of one process that rounds there."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarm.config import DataConfig, OptimizerConfig, RoundsConfig, RunConfig, WireConfig
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS
from swarm.training import optim
from tests.stage.backends import (
    CONFIG,
    DROPOUT,
    PLENTY,
    arrived,
    chain_of,
    reference_of,
    run_microbatch,
    sums_of,
    tokens_of,
)
from tests.support.chain import assert_close
from tests.support.rounding import rounding_reference


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("limit_bytes", [PLENTY, 0])
def test_a_smaller_type_on_the_wire_is_one_process_that_rounds_there(wire: Any, limit_bytes: int) -> None:
    """The two are exactly equal. They are also close to the result without rounding."""
    config = dataclasses.replace(DROPOUT, wire=WireConfig(dtype=wire))
    chain = chain_of(config, limit_bytes)
    losses = [run_microbatch(chain, microbatch)[0] for microbatch in range(3)]
    expected_losses, expected = rounding_reference(config, range(3))
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    unrounded = reference_of(DROPOUT, range(3))[1]
    for name, value in sums_of(chain).items():
        norm = float(expected[name].norm())
        assert float((value - expected[name]).norm()) < 1e-4 * norm, name
        assert float((value - unrounded[name]).norm()) < 0.05 * norm, name
    first = "embedding.weight"
    assert float((sums_of(chain)[first] - unrounded[first]).norm()) > 2e-4 * float(unrounded[first].norm()), "it rounds"


def test_fp16_loses_no_small_gradients() -> None:
    """The loss is a mean over 1,024 tokens, and hidden states are large: float16 alone would lose most gradients."""
    config = dataclasses.replace(
        CONFIG, data=DataConfig(sequence_length=128, microbatch_size=8),
        rounds=RoundsConfig(setting="synchronous", round_samples=8), optimizer=OptimizerConfig(learning_rate=1e-3),
    )  # fmt: skip
    exact, bf16, fp16 = (_learnt(config, dtype, num_steps=8) for dtype in ("fp32", "bf16", "fp16"))
    assert float((bf16 - exact).norm()) < 0.01 * float(exact.norm())
    assert float((fp16 - exact).norm()) < 0.25 * float((bf16 - exact).norm()), "it has three bits more"


def _learnt(config: RunConfig, dtype: Any, *, num_steps: int) -> torch.Tensor:
    """The change of the whole model's weights by some steps. The model's embedding is a thousand times too large."""
    chain = chain_of(dataclasses.replace(config, wire=WireConfig(dtype=dtype)))
    state = chain[0].weights.state_tensors()
    state["anchor/embedding.weight"].mul_(1000)
    chain[0].weights.install(state, chain[0].weights.round)
    before = _weights(chain)
    for number in range(num_steps):
        run_microbatch(chain, number, round_number=number)
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
@pytest.mark.parametrize("limit_bytes", [PLENTY, 0])
def test_a_bottleneck_is_one_process_s_too(wire: Any, limit_bytes: int) -> None:
    config = dataclasses.replace(
        DROPOUT, model=dataclasses.replace(DROPOUT.model, bottleneck_dim=8), wire=WireConfig(dtype=wire)
    )
    chain = chain_of(config, limit_bytes)
    losses = [run_microbatch(chain, microbatch)[0] for microbatch in range(3)]
    expected_losses, expected = (reference_of if wire == "fp32" else rounding_reference)(config, range(3))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert_close(sums_of(chain), expected, 1e-5)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_what_is_computed_again_travels_as_the_same_bytes(wire: Any) -> None:
    chain, other = (chain_of(dataclasses.replace(DROPOUT, wire=WireConfig(dtype=wire))) for _ in range(2))
    inputs = {TOKENS: tokens_of(5)}
    for stage in (0, 1):
        forwards = [backends[stage].forward(5, 0, inputs) for backends in (chain, other)]
        first, again = (arrived(forward.wire_hidden) for forward in forwards)
        assert torch.equal(first, again)
        inputs = {TOKENS: tokens_of(5), HIDDEN: first}
    answers = [backend.forward_loss(5, 0, inputs, accumulate=False)[1] for backend in (chain[2], other[2], chain[2])]
    gradients = [arrived(answer) for answer in answers]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
