"""The operations of a layer are compared with their formulas, as autograd differentiates these."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import ModelConfig
from swarm.model.attention import rotary_tables
from swarm.model.functions import rms_norm, rotate, swiglu, whole_tables

_EPSILON = 1e-5
_TABLES = rotary_tables(ModelConfig(d_model=8, num_heads=1, rope_theta=100.0), torch.arange(6))


def _norm(hidden: Tensor, weight: Tensor, *, fused: bool = False) -> Tensor:
    return rms_norm(hidden, weight, _EPSILON, fused=fused)


def _norm_formula(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + _EPSILON) * weight


def _rotate(heads: Tensor) -> Tensor:
    return rotate(heads, *_TABLES)


def _rotate_fused(heads: Tensor) -> Tensor:
    return rotate(heads, *whole_tables(*_TABLES))


def _rotate_formula(heads: Tensor) -> Tensor:
    (cos, sin), (first, second) = _TABLES, heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _swiglu_formula(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


_ALL: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "rms_norm": (_norm, _norm_formula, [(2, 6, 16), (16,)]),
    "rotate": (_rotate, _rotate_formula, [(2, 3, 6, 8)]),
    "swiglu": (swiglu, _swiglu_formula, [(2, 6, 24), (2, 6, 24)]),
}
_FUSED = {
    "fused rms_norm": (partial(_norm, fused=True), *_ALL["rms_norm"][1:]),
    "fused rotate": (_rotate_fused, *_ALL["rotate"][1:]),
    "fused swiglu": (partial(swiglu, fused=True), *_ALL["swiglu"][1:]),
}
_EACH = pytest.mark.parametrize(
    ("function", "formula", "shapes"), [*_ALL.values(), *_FUSED.values()], ids=[*_ALL, *_FUSED]
)


def _inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("compiling", [False, True])
@_EACH
def test_values_and_gradients_are_the_formulas(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], shapes: list[tuple[int, ...]], compiling: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    inputs = _inputs(shapes)
    torch.testing.assert_close(function(*inputs), formula(*inputs))
    assert torch.autograd.gradcheck(function, inputs)


@_EACH
def test_half_precision(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    """As under autocast, a projection gives bfloat16, which may be normed with a weight in float32 (Qwen3's heads)."""
    inputs = _inputs(shapes, torch.bfloat16)
    if formula is _norm_formula:
        inputs[1] = inputs[1].detach().float().requires_grad_()
    wanted = formula(*(value.detach().double() for value in inputs))
    found = function(*inputs)
    assert found.dtype == inputs[0].dtype
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=1e-6)
    found.float().sum().backward()  # type: ignore[no-untyped-call]
    assert all(value.grad is not None and value.grad.dtype == value.dtype for value in inputs)
