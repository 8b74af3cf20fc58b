"""What codecs do with vectors: they come in tile order, in chunks, and from bytes that are checked."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.compression.buffers import (
    CHUNK_ELEMENTS,
    Received,
    check_finite,
    check_scales,
    concatenate,
    cut,
    flatten,
    in_chunks,
    unflatten,
)
from swarm.errors import MalformedMessage


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, wrong: float) -> None:
    for length in (1, 3, 8, 33, 100):
        for place in range(length):
            vector_N = torch.ones(length, dtype=dtype)
            assert check_finite(vector_N, "it") is vector_N
            vector_N[place] = wrong
            with pytest.raises(MalformedMessage, match="it holds NaN or infinity"):
                check_finite(vector_N, "it")
            with pytest.raises(MalformedMessage, match="a scale of it is not a number between 0 and"):
                check_scales(vector_N, "it")


@pytest.mark.parametrize("length", [0, 1, 100, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 250])
def test_chunks_are_the_vector_with_zeros_behind(length: int) -> None:
    vector_N = torch.arange(1.0, length + 1)
    chunks = list(in_chunks(vector_N, 256))
    rows = [row for rows, _ in chunks for row in range(rows.start, rows.stop)]
    assert rows == list(range(-(-length // 256)))
    assert all(piece_RE.shape == (rows.stop - rows.start, 256) for rows, piece_RE in chunks)
    padded_N = torch.cat([torch.empty(0), *(piece_RE.flatten() for _, piece_RE in chunks)])
    assert torch.equal(padded_N[:length], vector_N)
    assert not padded_N[length:].any()


def test_received_bytes_are_neither_more_nor_fewer_than_expected() -> None:
    received = Received(5)
    received.add(b"abc")
    with pytest.raises(MalformedMessage, match="5 bytes are expected, 3 came"):
        received.whole()
    with pytest.raises(MalformedMessage, match="5 bytes are expected, 6 came"):
        received.add(b"def")
    received.add(b"de")
    assert bytes(received.whole()) == b"abcde"
    assert bytes(Received(0).whole()) == b""


shapes = st.one_of(
    st.just(()), st.tuples(st.integers(0, 5000)), st.tuples(st.integers(0, 200), st.integers(0, 200)),
    st.tuples(st.integers(1, 130), st.integers(1, 3), st.integers(1, 70)),
)  # fmt: skip


def _tensors(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors in which every element is a different number."""
    tensors, start = {}, 0
    for number, shape in enumerate(shapes):
        size = int(torch.tensor(shape).prod())
        tensors[f"t{-number}"] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    return tensors


def _vector(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A vector of NaN, to be filled."""
    return torch.full((sum(tensor.numel() for tensor in tensors.values()),), torch.nan)


@settings(max_examples=60)
@given(shapes=st.lists(shapes, max_size=5))
def test_unflatten_is_the_inverse(shapes: list[tuple[int, ...]]) -> None:
    tensors = _tensors(shapes)
    vector_D = flatten(tensors, _vector(tensors))
    assert sorted(vector_D.tolist()) == list(range(vector_D.numel()))
    again = unflatten(vector_D, tensors)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(again[name], tensor)
        assert again[name].is_contiguous()


def test_tiles_come_first_and_the_rest_in_the_order_of_names() -> None:
    tensors = {"b": torch.rand(130, 2, 70), "a": torch.rand(64, 200), "c": torch.rand(4096)}
    vector_D = flatten(tensors, _vector(tensors))
    a, b = tensors["a"], tensors["b"].view(130, 140)
    tiles = [a[:, 0:64], a[:, 64:128], a[:, 128:192], b[:64, :64], b[:64, 64:128], b[64:128, :64], b[64:128, 64:128]]
    for number, tile in enumerate(tiles):
        assert torch.equal(vector_D[4096 * number : 4096 * (number + 1)], tile.flatten())
    rest = [a[:, 192:], a[64:], b[:128, 128:], b[128:], tensors["c"]]
    assert torch.equal(vector_D[4096 * 7 :], torch.cat([piece.flatten() for piece in rest]))


def test_other_types_and_strides_become_plain_float32() -> None:
    tensors = {
        "half": torch.rand(70, 65).half(),
        "parameter": torch.nn.Parameter(torch.rand(5)),
        "transposed": torch.rand(65, 2, 66).permute(2, 1, 0),
    }
    vector_D = flatten(tensors, _vector(tensors))
    assert vector_D.dtype == torch.float32
    assert not vector_D.requires_grad
    for name, tensor in unflatten(vector_D, tensors).items():
        assert torch.equal(tensor, tensors[name].detach().float())


def test_concatenation_goes_by_name_and_back_without_a_copy() -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(7.0)}
    vector_D = concatenate(tensors, _vector(tensors))
    assert vector_D.tolist() == [7, 0, 1, 2, 3, 4, 5]
    back = cut(vector_D, tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert back["b"].untyped_storage().data_ptr() == vector_D.untyped_storage().data_ptr()
