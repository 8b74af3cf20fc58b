import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.compression import packing
from swarm.compression.indices import EliasFano, IndexCoder, TwelveBit
from swarm.compression.packing import Field, Numbers
from swarm.errors import MalformedMessage

COUNTS = [1, 3, 16, 48, 64, 100, 255, 1024, 3072, 4096]


def _indices(num_rows: int, count: int, seed: int) -> Numbers:
    random = np.random.default_rng(seed)
    rows = [np.sort(random.choice(4096, count, replace=False)) for _ in range(num_rows)]
    return np.array(rows, dtype=np.uint16).reshape(num_rows, count)


def _elias_fano(indices: list[int]) -> tuple[list[int], list[int]]:
    """The low parts and the unary bits, computed one number at a time."""
    count = len(indices)
    low_bits = math.floor(math.log2(4096 / count))
    unary = [0] * (count + 4096 // 2**low_bits - 1)
    for i, index in enumerate(indices):
        unary[index // 2**low_bits + i] = 1
    return [index % 2**low_bits for index in indices], unary


@settings(max_examples=40)
@given(count=st.sampled_from(COUNTS), num_rows=st.integers(0, 5), seed=st.integers(0, 1 << 30))
def test_both_coders_read_back_what_they_write(count: int, num_rows: int, seed: int) -> None:
    indices_RG = _indices(num_rows, count, seed)
    for coder in (EliasFano(count), TwelveBit(count)):
        packed = packing.pack(coder.encode(indices_RG), coder.fields)
        columns = packing.unpack(packed, coder.fields, num_rows)
        np.testing.assert_array_equal(coder.decode(columns), indices_RG)


@pytest.mark.parametrize("count", COUNTS)
def test_elias_fano_is_what_the_textbook_says(count: int) -> None:
    indices_RG = _indices(3, count, seed=count)
    low_RG, unary = EliasFano(count).encode(indices_RG)
    for row, indices in enumerate(indices_RG.tolist()):
        assert (low_RG[row].tolist(), unary[row].tolist()) == _elias_fano(indices)


@pytest.mark.parametrize(("coder", "bits"), [(EliasFano(16), 159), (EliasFano(48), 399), (TwelveBit(16), 192)])
def test_bits_of_a_tile(coder: IndexCoder, bits: int) -> None:
    assert packing.row_bits(coder.fields) == bits


@pytest.mark.parametrize("coder", [EliasFano(4), TwelveBit(4)], ids=["elias-fano", "12bit"])
@pytest.mark.parametrize("wrong", [[5, 5, 6, 7], [5, 4, 6, 7], [1, 2, 4095, 0]])
def test_indices_that_do_not_rise_are_refused(coder: IndexCoder, wrong: list[int]) -> None:
    columns = coder.encode(np.array([[1, 2, 3, 4095], sorted(wrong)], dtype=np.uint16))
    if isinstance(coder, EliasFano):
        # High parts rise by construction, so only the low parts within one of them can be in a wrong order.
        columns = [np.array([[1, 2, 3, 4], low], dtype=np.uint16) for low in [wrong]] + [
            coder.encode(np.array([[1, 2, 3, 4]] * 2, dtype=np.uint16))[1]
        ]
    else:
        columns = [np.array([[1, 2, 3, 4095], wrong], dtype=np.uint16)]
    with pytest.raises(MalformedMessage, match="do not rise"):
        coder.decode(columns)


@pytest.mark.parametrize("num_ones", [0, 3, 5, 7])
def test_elias_fano_refuses_a_wrong_number_of_ones(num_ones: int) -> None:
    coder = EliasFano(4)
    assert coder.fields == (Field(4, 10), Field(7, 1))
    low, unary = coder.encode(_indices(2, 4, seed=0))
    unary[1] = np.arange(7) < num_ones
    with pytest.raises(MalformedMessage, match="does not have 4 ones"):
        coder.decode([low, unary])
    # It is also wrong if one row has too many ones, and another one has as many too few.
    unary[0] = np.arange(7) < 8 - num_ones
    with pytest.raises(MalformedMessage, match="does not have 4 ones"):
        coder.decode([low, unary])
