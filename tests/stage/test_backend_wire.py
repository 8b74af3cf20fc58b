"""Smaller types and fewer channels on the wire: the numbers are those of one process that rounds there."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarm.config import DataConfig, OptimizerConfig, RoundsConfig, RunConfig, WireConfig
from swarm.stage.backend import StageBackend
from tests.stage.backends import (
    CONFIG,
    DROPOUT,
    PLENTY,
    chain_of,
    reference_of,
    run_microbatch,
    sums_of,
)
from tests.support.chain import assert_close
from tests.support.commits import end_rounds
from tests.support.rounding import rounding_reference


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
        end_rounds([backend.weights for backend in chain], num_samples=config.data.microbatch_size)
    return _weights(chain) - before


def _weights(chain: Sequence[StageBackend]) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for backend in chain for value in backend.weights.masters.values()])


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("limit_bytes", [PLENTY, 0])
@pytest.mark.parametrize("learned", [{}, {"bottleneck": "learned", "bottleneck_layers": (1, 2)}])
def test_a_bottleneck_is_one_process_s_too(wire: Any, limit_bytes: int, learned: dict[str, Any]) -> None:
    config = dataclasses.replace(
        DROPOUT, model=dataclasses.replace(DROPOUT.model, bottleneck_dim=8, **learned), wire=WireConfig(dtype=wire)
    )
    chain = chain_of(config, limit_bytes)
    losses = [run_microbatch(chain, microbatch)[0] for microbatch in range(3)]
    expected_losses, expected = (reference_of if wire == "fp32" else rounding_reference)(config, range(3))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert_close(sums_of(chain), expected, 1e-5)
