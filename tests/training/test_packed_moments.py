"""Moments in 8 bits: between two steps they are rounded to codes, and nothing else is different."""

import pytest
import torch

from swarm.config import OptimizerConfig
from swarm.training import optim
from swarm.training.blockwise import SIGNED, UNSIGNED, Packed
from swarm.training.optimizers import Muon

SHAPES = {
    "layers.0.up.weight": torch.Size((70, 301)),
    "embedding.weight": torch.Size((1001, 9)),
    "layers.0.small.weight": torch.Size((40, 100)),
    "layers.0.norm.weight": torch.Size((5000,)),
}
PACKED = "layers.0.up.weight", "embedding.weight"


def _drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _made(kind: str, moments: str) -> optim.AdamW:
    config = OptimizerConfig(moments=moments, weight_decay=0.1)  # type: ignore[arg-type]
    if kind == "muon":
        return Muon(config, same_bits=True)
    return optim.AdamW(config, fused=kind == "fused")


def _rounded(key: str, value: torch.Tensor) -> torch.Tensor:
    packed = Packed(UNSIGNED if key == "exp_avg_sq" else SIGNED, value.shape, value.device)
    packed.pack(value)
    return packed.unpacked()


@pytest.mark.parametrize("kind", ["adamw", "fused", "muon"])
def test_a_step_is_that_of_float32_moments_which_are_rounded_afterwards(kind: str) -> None:
    ours, optimizer = _drawn(0), _made(kind, "int8")
    for step in range(4):
        theirs, reference = {name: value.clone() for name, value in ours.items()}, _made(kind, "fp32")
        optim.load_state_tensors(reference, theirs, optim.state_tensors(optimizer, ours))
        for each, weights in ((optimizer, ours), (reference, theirs)):
            optim.step(each, weights, _drawn(100 + step), 0.01)
        # torch's fused step fuses products with sums, in other places for pieces than for the whole.
        tolerance = 1e-5 if kind == "fused" else 0.0
        for name, weight in ours.items():
            torch.testing.assert_close(weight, theirs[name], rtol=tolerance, atol=tolerance / 10)
        expected = optim.state_tensors(reference, theirs)
        assert optim.state_views(optimizer, ours).keys() == expected.keys()
        for name, value in optim.state_views(optimizer, ours).items():
            parameter, key = name.split("/")
            if parameter in PACKED:
                rounded = _rounded(key, expected[name])
                assert kind == "fused" or torch.equal(value, rounded)
                # A number between two codes may fall to the other one.
                assert float((value - rounded).abs().max() / expected[name].abs().max()) < 0.015
            else:
                torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_who_gets_the_state_goes_on_with_the_same_bits(kind: str) -> None:
    """A joiner, or a run that goes on from a checkpoint."""
    giver, optimizer = _drawn(0), _made(kind, "int8")
    optim.step(optimizer, giver, _drawn(1), 0.01)
    taker, other = {name: value.clone() for name, value in giver.items()}, _made(kind, "int8")
    optim.load_state_tensors(other, taker, optim.state_tensors(optimizer, giver))
    for step in range(2, 5):
        for each, weights in ((optimizer, giver), (other, taker)):
            optim.step(each, weights, _drawn(step), 0.01)
    assert all(torch.equal(giver[name], taker[name]) for name in SHAPES)
