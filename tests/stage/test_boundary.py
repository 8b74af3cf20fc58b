"""Tensors between stages: their size is as promised, their bytes are the same every time, and their values are
close."""

import math
from functools import partial

import pytest
import torch

from swarm.errors import MalformedMessage
from swarm.rpc.wire import TensorReader, TensorSpec, require_in_range
from swarm.stage.boundary import Boundary
from swarm.stage.staging import Staging
from tests.support.chunks import pieces
from tests.support.rounding import rounded

_STAGING = Staging()
_DTYPES = ("fp32", "bf16", "fp16", "int8")


def _boundary(encoding: str) -> Boundary:
    return Boundary(encoding=encoding, width=96)


def _hidden(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(0))


def _travel(boundary: Boundary, tensor: torch.Tensor) -> torch.Tensor:
    """Send a tensor through messages, as one stage sends it and the next reads it."""
    reader = TensorReader({"hidden": boundary.spec(3, 7)})
    for piece in pieces("hidden", boundary.encode(tensor, _STAGING).wait()):
        reader.feed(piece)
    assert reader.complete
    require_in_range("hidden", reader.tensors["hidden"], boundary.encoding)
    return boundary.decode(reader.tensors["hidden"], 3, 7, _STAGING)


def test_halves_and_quarters_of_the_bytes() -> None:
    num_bytes = {name: Boundary(encoding=name, width=256).spec(8, 128).num_bytes for name in _DTYPES}
    assert num_bytes["fp32"] == 8 * 128 * 256 * 4
    assert [num_bytes["fp32"] / num_bytes[name] for name in _DTYPES] == pytest.approx([1, 2, 2, 512 / 130], rel=1e-5)
    assert _boundary("fp16").spec(3, 7) == TensorSpec(shape=(1 + 3 * 7 * 96,), encoding="fp16"), "the scale comes first"
    assert _boundary("int8").spec(3, 7) == TensorSpec(shape=(130 * 16,), encoding="int8"), "the last block is filled up"


@pytest.mark.parametrize("scale", [1e4, 1.0, 3e-6, 1e-30, 0.0])
@pytest.mark.parametrize("name", _DTYPES)
def test_what_arrives_is_what_the_protocol_says(name: str, scale: float) -> None:
    """The tensors are activations, gradients of a mean over many tokens, and zeros."""
    arrived = _travel(_boundary(name), _hidden(scale))
    assert arrived.shape == (3, 7, 96)
    assert torch.equal(arrived, rounded(_hidden(scale), name))
    error = (arrived - _hidden(scale)).double().norm()
    assert error <= {"fp32": 0.0, "bf16": 2e-3, "fp16": 3e-4, "int8": 7e-3}[name] * _hidden(scale).double().norm()


@pytest.mark.parametrize("largest", [65504.0, 65503.9, 32768.0, 32767.9, 1.0, 0.99999997, 2.0**-111, 1e-38, 1e-45])
def test_the_largest_number_neither_overflows_nor_vanishes_in_fp16(largest: float) -> None:
    tensor = torch.zeros(3, 7, 96)
    tensor[0, 0, 0], tensor[1, 1, 1] = -largest, largest / 2**20
    arrived = _travel(_boundary("fp16"), tensor)
    assert torch.allclose(arrived, tensor, rtol=1e-3, atol=1e-37 if largest < 1e-30 else 0.0)


@pytest.mark.parametrize("exponent", [14.0, 255.0, 127.5, -1.0, math.nan, math.inf])
def test_a_scale_that_nobody_encodes_is_refused(exponent: float) -> None:
    wire = _boundary("fp16").encode(_hidden(), _STAGING).wait().clone()
    wire[0] = exponent
    for use in (
        partial(require_in_range, "hidden", encoding="fp16"),
        lambda wire: _boundary("fp16").decode(wire, 3, 7, _STAGING),
    ):
        with pytest.raises(MalformedMessage, match="fp16"):
            use(wire)


@pytest.mark.parametrize("name", _DTYPES)
def test_the_same_numbers_give_the_same_bytes(name: str) -> None:
    boundary = _boundary(name)
    strided = _hidden().transpose(0, 1).contiguous().transpose(0, 1)
    once, again = (boundary.encode(tensor, _STAGING).wait() for tensor in (_hidden(), strided))
    assert torch.equal(once, again)
    assert torch.equal(boundary.decode(once, 3, 7, _STAGING), boundary.decode(again.clone(), 3, 7, _STAGING))


@pytest.mark.parametrize("name", _DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e6])
def test_numbers_that_nobody_can_use_are_refused_by_the_receiver(name: str, bad: float) -> None:
    tensor = _hidden()
    tensor[1, 2, 3] = bad
    with pytest.raises(MalformedMessage):
        _travel(_boundary(name), tensor)
