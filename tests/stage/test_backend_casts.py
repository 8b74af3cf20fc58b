"""Products in bfloat16: all graphs of a version share one cast of its weights. Bottlenecks, and int8 on the wire."""

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarm.config import DataConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig
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
from tests.support.commits import end_rounds, state_tensors
from tests.support.rounding import rounding_reference


def _bf16(config: RunConfig, *, tied: bool = False, checkpointing: bool = False) -> RunConfig:
    model = dataclasses.replace(
        config.model, autocast="bf16", tied_embeddings=tied, gradient_checkpointing=checkpointing
    )
    return dataclasses.replace(config, model=model)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_casts_that_graphs_share_give_the_bits_of_casts_of_their_own(stages: int, checkpointing: bool) -> None:
    """Casts of its own are those that torch.autocast makes of the float32 weights."""
    config = dataclasses.replace(
        _bf16(DROPOUT, tied=True, checkpointing=checkpointing), stages=StagesConfig(num_stages=stages)
    )
    sums = []
    for shared in (True, False):
        with contextlib.nullcontext() if shared else _without_shared_casts():
            chain = chain_of(config)
            losses = [run_microbatch(chain, microbatch)[0] for microbatch in range(2)]
        sums.append({"loss": torch.tensor(losses), **sums_of(chain)})
    assert all(torch.equal(value, sums[1][name]) for name, value in sums[0].items())


def _without_shared_casts() -> Any:
    return unittest.mock.patch("swarm.stage.function.with_shared_casts", lambda module, parameters, casts: parameters)


# -- the wire ----------------------------------------------------------------------------------------------------------


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
    state = state_tensors(chain[0].weights)
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
