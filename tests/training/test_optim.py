"""Optimizers take the steps that their papers and torch say."""

from typing import Any

import pytest
import torch
from torch import nn

from swarm.config import OptimizerConfig, OuterConfig
from swarm.training import optim


def _parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": nn.Parameter(torch.randn(4, 3, generator=generator)),
        "vector": nn.Parameter(torch.randn(3, generator=generator)),
    }


def _gradients(step: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in _parameters(100 + step).items()}


# -- AdamW -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "fused adamw", "outer", "outer without momentum"])
def test_steps_are_those_of_torchs_own_optimizers(kind: str) -> None:
    """They are the same except for the last bits, which torch lets depend on the processor."""
    ours, theirs = _parameters(), _parameters()
    if "adamw" in kind:
        config = OptimizerConfig(beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.3)
        optimizer: optim.Optimizer = optim.AdamW(config, fused=kind == "fused adamw")
        groups: list[dict[str, Any]] = [
            {"params": [theirs["matrix"]], "weight_decay": 0.3},
            {"params": [theirs["vector"]]},
        ]
        reference: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    else:
        momentum = 0.9 if kind == "outer" else 0.0
        optimizer = optim.OuterSgd(OuterConfig(momentum=momentum))
        reference = torch.optim.SGD(theirs.values(), momentum=momentum, nesterov=momentum > 0)
    for step, rate in enumerate([0.1, 0.05, 0.02, 0.02]):
        optim.step(optimizer, ours, _gradients(step), rate)
        for group in reference.param_groups:
            group["lr"] = rate
        for name, gradient in _gradients(step).items():
            theirs[name].grad = gradient
        reference.step()
    state = optim.state_tensors(optimizer, ours)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-6, atol=1e-7)
        for key, value in reference.state[parameter].items():
            torch.testing.assert_close(state.pop(f"{name}/{key}"), value, rtol=1e-6, atol=1e-7)
    assert not state


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "outer"])
def test_an_optimizer_goes_on_from_a_transferred_state(kind: str) -> None:
    """With the loaded state it takes the same steps as the one that gave it, to the bit."""

    def build() -> optim.Optimizer:
        if kind == "adamw":
            return optim.AdamW(OptimizerConfig(weight_decay=0.1))
        return optim.OuterSgd(OuterConfig(momentum=0.9))

    giver = _parameters()
    optimizer = build()
    for step in range(3):
        optim.step(optimizer, giver, _gradients(step), 0.1)
    state = {name: value.clone() for name, value in optim.state_tensors(optimizer, giver).items()}

    taker = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in giver.items()}
    other = build()
    optim.step(other, {name: nn.Parameter(p.detach().clone()) for name, p in taker.items()}, _gradients(9), 0.1)
    optim.load_state_tensors(other, taker, state)
    for step in range(3, 5):
        optim.step(optimizer, giver, _gradients(step), 0.1)
        optim.step(other, taker, _gradients(step), 0.1)
    for name in giver:
        assert torch.equal(giver[name], taker[name])
