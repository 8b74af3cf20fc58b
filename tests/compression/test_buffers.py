import math

import pytest
import torch

from swarm.compression.buffers import CHUNK_ELEMENTS, Received, as_tensor, check_finite, check_scales, in_chunks, slices
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


def test_writable_memory_is_shared_and_read_only_memory_is_copied() -> None:
    buffer = bytearray(b"abc")
    as_tensor(buffer, 3, "it")[0] = ord("x")
    assert buffer == b"xbc"
    constant = b"abc"
    for view in (constant, memoryview(constant)):
        as_tensor(view, 3, "it")[0] = ord("x")
    assert constant == b"abc"


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


def test_slices_cover_a_length() -> None:
    assert list(slices(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(slices(0, 3)) == []


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
