"""Muon's steps are torch's own; with `same_bits` they are the same bits on any machine."""

import dataclasses
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from torch import nn

from swarm.config import ModelConfig, OptimizerConfig, RunConfig, StagesConfig
from swarm.model.stages import build_stage
from swarm.training import optim
from swarm.training.optimizers import (
    Muon,
    exact_product,
    exactly_orthogonal,
    is_hidden_matrix,
    orthogonal,
)

CONFIG = OptimizerConfig(name="muon", momentum=0.9, weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-6)
SHAPES = {
    "layers.0.up.weight": (6, 4), "layers.1.down.weight": (4, 6), "head.output.weight": (5, 4), "norm.weight": (4,),
}  # fmt: skip


def _parameters(seed: int, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def _gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in _parameters(100 + step, dtype).items()}


def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's Muon, which makes all matrices orthogonal in bfloat16, compute in float64."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.double().clone())


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("same_bits", "fused", "tolerance"),
    [(False, False, 1e-12), (True, False, 1e-5), (False, True, 1e-6), (True, True, 1e-5)],
)
def test_steps_are_those_of_torchs_own_optimizers_in_float64(
    adjust_lr_fn: Literal["original", "match_rms_adamw"], nesterov: bool, same_bits: bool, fused: bool,
    tolerance: float, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With `same_bits` matrices keep about 24 bits in products as small as these, so a step has no more."""
    _in_float64(monkeypatch)
    config = dataclasses.replace(CONFIG, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov)
    ours, theirs = _parameters(0, torch.float64), _parameters(0, torch.float64)
    optimizer = Muon(config, same_bits=same_bits, fused=fused)
    muon = torch.optim.Muon(
        [theirs["layers.0.up.weight"], theirs["layers.1.down.weight"]],
        weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn,
    )  # fmt: skip
    groups: list[dict[str, Any]] = [
        {"params": [theirs["head.output.weight"]], "weight_decay": 0.3},
        {"params": [theirs["norm.weight"]]},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    for step, rate in enumerate([0.1, 0.05, 0.02, 0.02]):
        optim.step(optimizer, ours, _gradients(step, torch.float64), rate)
        for name, gradient in _gradients(step, torch.float64).items():
            theirs[name].grad = gradient
        for reference in (muon, adamw):
            for group in reference.param_groups:
                group["lr"] = rate
            reference.step()  # type: ignore[no-untyped-call]  # torch's Muon
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=tolerance, atol=tolerance)
    state = optim.state_tensors(optimizer, ours)
    assert state.keys() == {
        *(f"{name}/momentum_buffer" for name in ("layers.0.up.weight", "layers.1.down.weight")),
        *(
            f"{name}/{key}"
            for name in ("head.output.weight", "norm.weight")
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
    }
    for name in ("layers.0.up.weight", "layers.1.down.weight"):
        expected = muon.state[theirs[name]]["momentum_buffer"]
        torch.testing.assert_close(state[f"{name}/momentum_buffer"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(64, 64), (150, 40), (40, 150), (1, 5)])
@pytest.mark.parametrize("same_bits", [True, False])
def test_singular_values_become_about_one(shape: tuple[int, int], same_bits: bool) -> None:
    """They do in float32 as well, and whatever the matrix's size."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for scale in (1.0, 1e-5, 1e12):
        result = (exactly_orthogonal if same_bits else orthogonal)(matrix[None] * scale)[0]
        values = torch.linalg.svdvals(result)
        assert result.dtype is torch.float32
        assert 0.2 < float(values.min()) <= float(values.max()) < 1.25


@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24)])
def test_matrices_that_are_computed_together_have_the_bits_of_each_alone(shape: tuple[int, ...]) -> None:
    matrices = (
        torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.tensor([1e-9, 0.0, 1e4])[:, None, None]
    )
    expected = [exactly_orthogonal(matrix[None]) for matrix in matrices]
    assert torch.equal(exactly_orthogonal(matrices), torch.cat(expected))


def test_no_sum_of_products_is_rounded() -> None:
    """So any order gives the same bits. Here terms are summed in reverse too, with fused operations and without."""
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((9, 700), (700, 8)))
    product = exact_product(left, right)
    assert torch.equal(product, exact_product(left.flip(1), right.flip(0)))
    assert torch.equal(product, exact_product(right.T, left.T).T)
    assert not torch.equal(left @ right, left.flip(1) @ right.flip(0)), "or the test shows nothing"
    torch.testing.assert_close(product, left @ right, rtol=0, atol=1e-4)


class Rows:
    """How one of two processes, which are threads here, has half of every matrix's rows."""

    def __init__(self, place: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._place, self._parts, self._barrier = place, parts, barrier

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        self._barrier.wait(60.0)  # Nobody reads what was put here before.
        self._parts[self._place] = part
        self._barrier.wait(60.0)
        return torch.cat(self._parts)

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2)[self._place]


def test_parts_of_matrices_are_stepped_as_the_whole_matrices_are() -> None:
    names = [name for name in SHAPES if name.startswith("layers.")]
    parts, barrier = [torch.empty(0)] * 2, threading.Barrier(2)

    def trained(cut: Rows | None) -> dict[str, torch.Tensor]:
        def own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: (cut.part_of(name, tensors[name]) if cut else tensors[name]).detach() for name in names}

        parameters, optimizer = own(_parameters(0, torch.float64)), Muon(CONFIG, same_bits=False, cut=cut)
        for step in range(3):
            optim.step(optimizer, parameters, own(_gradients(step, torch.float64)), 0.1)
        return parameters

    with ThreadPoolExecutor() as threads:
        halves = list(threads.map(trained, [Rows(place, parts, barrier) for place in range(2)]))
    for name, expected in trained(None).items():
        found = torch.cat([half[name] for half in halves])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_every_cut_makes_the_same_choice(num_stages: int, positions: Literal["rope", "learned"]) -> None:
    """That holds for a tied matrix as well, which is the head of the last stage."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=3, d_model=8, num_heads=2, vocab_size=16, tied_embeddings=True, positions=positions,
            max_positions=512 if positions == "learned" else 0,
        ),
        stages=StagesConfig(num_stages=num_stages),
    )  # fmt: skip
    chosen: dict[str, bool] = {}
    for stage in range(num_stages):
        for name, parameter in build_stage(config, stage, device="cpu").named_parameters():
            assert chosen.setdefault(name, is_hidden_matrix(name, parameter.shape)) == is_hidden_matrix(
                name, parameter.shape
            )
    others = {"embedding.weight", "head.norm.weight"} | ({"positions.weight"} if positions == "learned" else set())
    norms = {name for name in chosen if name.endswith("norm.weight")}
    assert {name for name, is_hidden in chosen.items() if not is_hidden} == others | norms
    assert sum(chosen.values()) == 3 * 7
