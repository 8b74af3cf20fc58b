"""The operations of a layer are compared with their formulas, as autograd differentiates these."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from swarm.config import ModelConfig
from swarm.model.attention import rotary_tables
from swarm.model.functions import RMSNorm, rms_norm, rotate, swiglu, whole_tables

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
_EACH_LEAN = pytest.mark.parametrize(("function", "formula", "shapes"), _ALL.values(), ids=_ALL)


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
def test_inputs_that_are_views(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    """Heads are a view of a projection's output, and no input is written to."""
    inputs = _inputs([tuple(reversed(shape)) for shape in shapes], torch.float32)
    before = [value.detach().clone() for value in inputs]
    found = function(
        *(value.mT if value.ndim == 2 else value.permute(*reversed(range(value.ndim))) for value in inputs)
    )
    wanted = formula(*(value.permute(*reversed(range(value.ndim))) for value in before))
    torch.testing.assert_close(found, wanted)
    found.sum().backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    assert all(torch.equal(value, old) for value, old in zip(inputs, before, strict=True))


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


@_EACH
def test_the_same_bits_without_gradients(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    del formula
    inputs = _inputs(shapes, torch.float32)
    with torch.no_grad():
        found = function(*inputs)
    assert not found.requires_grad
    assert torch.equal(found, function(*inputs))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its address."""
    return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}


def _kept(of: Callable[..., Tensor], inputs: list[Tensor]) -> dict[int, int]:
    """The storages that are kept for the backward, as `_storages` gives them."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        of(*inputs)
    return _storages(saved)


@_EACH_LEAN
def test_less_is_kept_than_by_autograd(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    inputs = _inputs(shapes)

    def kept_bytes(of: Callable[..., Tensor]) -> int:
        own = _storages((*inputs, *_TABLES))
        return sum(num_bytes for pointer, num_bytes in _kept(of, inputs).items() if pointer not in own)

    one_number_a_row = inputs[0].nbytes // inputs[0].shape[-1]
    assert kept_bytes(function) <= one_number_a_row
    if function is _rotate:
        # Autograd keeps no more than that of the rotation either.
        assert _kept(function, inputs).keys() <= _storages(_TABLES).keys()
    else:
        assert kept_bytes(formula) > kept_bytes(function)


def test_a_row_of_zeros_has_a_gradient() -> None:
    hidden, weight = torch.zeros(1, 2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    _norm(hidden, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.full((1, 2, 4), _EPSILON**-0.5))


def test_rms_norm_ignores_the_scale_of_its_input() -> None:
    norm = RMSNorm(16, 1e-12)
    hidden = torch.randn(2, 3, 16)
    torch.testing.assert_close(norm(hidden * 100), norm(hidden))
    torch.testing.assert_close(norm(hidden).square().mean(-1), torch.ones(2, 3))
