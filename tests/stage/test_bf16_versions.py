"""Versions in bfloat16: microbatches compute with rounded weights, and everything else stays in float32."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from swarm.config import ModelConfig, RunConfig
from swarm.config.schedule import learning_rate
from swarm.model.functions import rows
from swarm.model.masks import DropoutKey
from swarm.model.stages import build_transformer
from swarm.stage.state import digest_of
from swarm.stage.weights import Round
from swarm.training import optim
from swarm.training.optimizers import gradient_optimizer
from swarm.training.scaling import clip, squared_norm_of
from tests.stage.backends import (
    CONFIG,
    DILOCO,
    GPT2,
    backend_of,
    chain_of,
    run_microbatch,
    sums_of,
    tokens_of,
)
from tests.support.commits import end_round, end_rounds, state_tensors

TIED = dataclasses.replace(CONFIG.model, tied_embeddings=True, qkv_bias=True)
ROUNDING = 2.0**-8
"""The largest relative error of a number in bfloat16."""


def _with(config: RunConfig, model: ModelConfig | None = None, **changes: Any) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(model or config.model, versions="bf16", **changes))


def _rounded(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w.detach().bfloat16().float() if w.ndim > 1 else w.detach().clone() for name, w in weights.items()}


def _assert_near(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max() / value.abs().max()) < tolerance, name


def _gradients(config: RunConfig, weights: Mapping[str, torch.Tensor], numbers: range) -> dict[str, torch.Tensor]:
    """Summed over all targets, with rounded weights in one process; its products are computed as those of stages."""
    model = build_transformer(dataclasses.replace(config, model=dataclasses.replace(config.model, versions="fp32")),
                              device="cpu")  # fmt: skip
    model.load_state_dict(_rounded(weights), strict=False)
    for number in numbers:
        key = DropoutKey(seed=config.data.seed, microbatch=number)
        loss = model.loss(tokens_of(number).long(), key) * config.data.tokens_per_microbatch
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("autocast", ["off", "bf16"])
@pytest.mark.parametrize("model", [CONFIG.model, TIED, GPT2], ids=["llama", "tied", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_rounded_weights(model: ModelConfig, autocast: str, checkpointing: bool) -> None:
    config = _with(CONFIG, model, autocast=autocast, gradient_checkpointing=checkpointing)
    chain = chain_of(config)
    weights = {name: w for backend in chain for name, w in backend.weights.masters.items()}
    for backend in chain:
        version = backend.weights.version.parameters
        types = {name: torch.bfloat16 if w.ndim > 1 else torch.float32 for name, w in version.items()}
        assert {name: w.dtype for name, w in version.items()} == types
    found = dict[str, torch.Tensor]()
    for number in range(3):
        run_microbatch(chain, number)
    for backend in chain:
        # The two stages that hold a tied matrix each have a part of its gradient.
        for name, value in backend.weights.buckets.open().sums.items():
            assert value.dtype is torch.float32
            found[name] = found.get(name, torch.zeros(())) + value
        assert not backend.weights.version.casts
    _assert_near(found, _gradients(config, weights, range(3)), 2 * ROUNDING if autocast == "off" else 0.04)


@pytest.mark.parametrize("graphs", [0, 1 << 30])
def test_what_is_taken_out_leaves_the_bits_of_what_stays(graphs: int) -> None:
    chain = chain_of(_with(CONFIG), graphs)
    run_microbatch(chain, 0)
    before = sums_of(chain)
    entries = [run_microbatch(chain, number)[1] for number in (1, 2, 3)]
    for stage, backend in enumerate(chain):
        backend.roll_back([leaving[stage] for leaving in entries])
    after = sums_of(chain)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_synchronous_rounds_are_those_of_one_process() -> None:
    """With moments in 8 bits as well. A microbatch of the round before is computed with that round's weights."""
    optimizer = dataclasses.replace(CONFIG.optimizer, moments="int8", learning_rate=1e-3)
    config = dataclasses.replace(_with(CONFIG, d_model=64, num_heads=2), optimizer=optimizer)
    chain = chain_of(config)
    masters = {name: w.detach().clone() for backend in chain for name, w in backend.weights.masters.items()}
    adamw = gradient_optimizer(config, same_bits=True)
    for number in range(3):
        numbers = range(2 * number, 2 * number + 2)
        losses = [run_microbatch(chain, each, round_number=number)[0] for each in numbers]
        expected = _gradients(config, masters, numbers)
        mean = {name: value / (2 * config.data.tokens_per_microbatch) for name, value in expected.items()}
        clip(mean, squared_norm_of(mean.values()), config.optimizer.clip_norm)
        optim.step(adamw, masters, mean, learning_rate(config.gradient_step, 16 * number))
        end_rounds([backend.weights for backend in chain])
        again = [run_microbatch(chain, each, round_number=number, accumulate=False)[0] for each in numbers]
        assert again == losses
    found = {name: w.detach() for backend in chain for name, w in backend.weights.masters.items()}
    # A step of Adam is as large as the rate, also for a gradient that is nearly 0.
    assert max(float((found[name] - masters[name]).abs().mean()) for name in masters) < 1e-4
    assert all(w.dtype is torch.float32 for w in found.values())
    state = state_tensors(chain[0].weights)
    assert all(torch.equal(state[f"anchor/{name}"], w) for name, w in chain[0].weights.masters.items())


def test_who_gets_the_state_has_the_same_weights() -> None:
    for config in (_with(CONFIG), _with(DILOCO)):
        holder, newcomer = backend_of(config, 1).weights, backend_of(config, 1).weights
        end_round(holder, {name: torch.ones_like(w) for name, w in holder.masters.items()}, total_squared_norm=1.0)
        state = state_tensors(holder)
        newcomer.install(state, Round(number=1))
        assert digest_of(newcomer.state()) == digest_of(holder.state())
        assert all(value.dtype is torch.float32 for value in state.values())
        assert all(torch.equal(w, newcomer.version.parameters[name]) for name, w in holder.version.parameters.items())


def test_the_gradients_of_rows_that_come_often_are_added_up_in_float32() -> None:
    table = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(rows(torch.ones(4096, dtype=torch.long), table).sum(), table)
    assert torch.equal(gradient[1], torch.full((4,), 4096.0).bfloat16())
