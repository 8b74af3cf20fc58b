import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.compression import packing
from swarm.compression.packing import Field

fields_of_a_row = st.lists(st.builds(Field, st.integers(1, 9), st.integers(0, 16)), min_size=1, max_size=4)


def _columns(fields: list[Field], num_rows: int, seed: int) -> list[packing.Numbers]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << f.width, (num_rows, f.count), dtype=np.uint16) for f in fields]


@settings(max_examples=100)
@given(fields=fields_of_a_row, num_rows=st.integers(0, 20), seed=st.integers(0, 1 << 30))
def test_the_stream_has_no_gap_and_reads_back(fields: list[Field], num_rows: int, seed: int) -> None:
    columns = _columns(fields, num_rows, seed)
    packed = packing.pack(columns, fields)
    expected, place = 0, 0
    for row in range(num_rows):
        for field, column in zip(fields, columns, strict=True):
            for number in column[row].tolist():
                expected |= number << place
                place += field.width
    assert place == num_rows * packing.row_bits(fields)
    assert packed.tobytes() == expected.to_bytes(packing.num_bytes(fields, num_rows), "little")
    for column, again in zip(columns, packing.unpack(packed, fields, num_rows), strict=True):
        np.testing.assert_array_equal(again, column)


def test_twelve_bits_are_two_numbers_in_three_bytes() -> None:
    packed = packing.pack([np.array([[0x123, 0xABC]], dtype=np.uint16)], [Field(2, 12)])
    assert packed.tolist() == [0x23, 0xC1, 0xAB]


def test_spare_bits_are_ignored() -> None:
    fields = [Field(3, 3)]
    packed = packing.pack(_columns(fields, 1, 0), fields)
    spoilt = packed.copy()
    spoilt[-1] |= 0xFE
    np.testing.assert_array_equal(packing.unpack(packed, fields, 1), packing.unpack(spoilt, fields, 1))


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 0), (1, 2), (8, 9)])
def test_sizes(num_rows: int, expected: int) -> None:
    assert packing.num_bytes([Field(1, 8), Field(1, 1)], num_rows) == expected
