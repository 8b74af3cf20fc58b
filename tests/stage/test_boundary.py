"""What crosses between stages: as small as promised, the same bytes every time, and close to what was meant."""

import math

import pytest
import torch

from swarm.errors import MalformedMessage
from swarm.rpc.wire import TensorReader, TensorSpec, require_in_range
from swarm.stage.boundary import Boundary
from swarm.stage.staging import Staging
from tests.support.chunks import chunks
from tests.support.rounding import rounded

_STAGING = Staging()
_DTYPES = ("fp32", "bf16", "fp16", "int8")


def _boundary(encoding: str) -> Boundary:
    return Boundary(encoding=encoding, width=96)


def _hidden(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(0))


def _travel(boundary: Boundary, tensor: torch.Tensor) -> torch.Tensor:
    """Through messages, as one stage sends it and the next reads it."""
    reader = TensorReader({"hidden": boundary.spec(3, 7)})
    for chunk in chunks("hidden", boundary.encode(tensor, _STAGING).wait()):
        reader.feed(chunk)
    assert reader.complete
    require_in_range("hidden", reader.tensors["hidden"])
    return boundary.decode(reader.tensors["hidden"], 3, 7, _STAGING)


def test_halves_and_quarters_of_the_bytes() -> None:
    num_bytes = {name: Boundary(encoding=name, width=256).spec(8, 128).num_bytes for name in _DTYPES}
    assert num_bytes["fp32"] == 8 * 128 * 256 * 4
    assert [num_bytes["fp32"] / num_bytes[name] for name in _DTYPES] == pytest.approx([1, 2, 2, 512 / 130])
    assert _boundary("int8").spec(3, 7) == TensorSpec(shape=(130 * 16,), encoding="int8"), "the last block is filled up"


@pytest.mark.parametrize("scale", [1.0, 3e-6, 0.0])
@pytest.mark.parametrize("name", _DTYPES)
def test_what_arrives_is_what_the_protocol_says(name: str, scale: float) -> None:
    """Activations, gradients of a mean over many tokens, and nothing at all."""
    arrived = _travel(_boundary(name), _hidden(scale))
    assert arrived.shape == (3, 7, 96)
    assert torch.equal(arrived, rounded(_hidden(scale), name))
    if name != "fp16":
        error = float((arrived - _hidden(scale)).norm())
        assert error <= {"fp32": 0.0, "bf16": 2e-3, "int8": 7e-3}[name] * float(_hidden(scale).norm())


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
