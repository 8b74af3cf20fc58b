import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.compression.values import (
    LEVELS,
    Field,
    Numbers,
    Signs,
    Table,
    num_bytes,
    pack,
    quantize_statistically,
    row_bits,
    unpack,
)
from swarm.errors import MalformedMessage
from tests.compression.all_codecs import make_vector


def test_levels_are_powers_of_the_sixteenth_root() -> None:
    for code, level in enumerate(LEVELS.tolist()):
        assert level == (pytest.approx(2 ** (-code / 16), rel=1e-7) if code < 255 else 0)
    # Every peer has to have these very bits.
    digits = [LEVELS[code].tobytes().hex() for code in (0, 1, 16, 100, 254)]
    assert digits == ["0000803f", "7d25753f", "0000003f", "fd44573c", "c2958b37"]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_headers_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(MalformedMessage, match="not a finite number"):
        Signs([1]).read_header(np.frombuffer(struct.pack("<f", wrong), dtype=np.uint8))
    if wrong != -1.0:
        header = np.frombuffer(struct.pack("<256f", *[0.0] * 255, wrong), dtype=np.uint8)
        with pytest.raises(MalformedMessage, match="NaN or infinity"):
            Table(1).read_header(header)


@pytest.mark.parametrize("num_bins", [4, 256])
def test_the_statistical_quantiser_is_the_published_one(num_bins: int) -> None:
    """It is compared with the formulas, one number at a time."""
    values = (make_vector(999) + 0.3).double().tolist()
    codes, table = quantize_statistically(np.array(values, dtype=np.float32), num_bins)
    mean = sum(values) / 999
    scale = 6 * math.sqrt(sum((value - mean) ** 2 for value in values) / 998) / num_bins
    expected = [min(max(round((value - mean) / scale + num_bins / 2), 0), num_bins - 1) for value in values]
    assert codes.tolist() == expected
    for code in range(num_bins):
        members = [value for value, other in zip(values, expected, strict=True) if other == code]
        assert table[code] == pytest.approx(sum(members) / len(members) if members else mean, rel=1e-6)


fields_of_a_row = st.lists(st.builds(Field, st.integers(1, 9), st.integers(0, 16)), min_size=1, max_size=4)


def _columns(fields: list[Field], num_rows: int, seed: int) -> list[Numbers]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << f.width, (num_rows, f.count), dtype=np.uint16) for f in fields]


@settings(max_examples=100)
@given(fields=fields_of_a_row, num_rows=st.integers(0, 20), seed=st.integers(0, 1 << 30))
def test_the_stream_has_no_gap_and_reads_back(fields: list[Field], num_rows: int, seed: int) -> None:
    columns = _columns(fields, num_rows, seed)
    packed = pack(columns, fields)
    expected, place = 0, 0
    for row in range(num_rows):
        for field, column in zip(fields, columns, strict=True):
            for number in column[row].tolist():
                expected |= number << place
                place += field.width
    assert place == num_rows * row_bits(fields)
    assert packed.tobytes() == expected.to_bytes(num_bytes(fields, num_rows), "little")
    for column, again in zip(columns, unpack(packed, fields, num_rows), strict=True):
        np.testing.assert_array_equal(again, column)
