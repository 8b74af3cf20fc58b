"""Packs numbers of a few bits each without gaps: rows of fields become one stream of bits.

Used by indices.py, values.py and sparsify.py. The stream is little-endian: the first number begins in the lowest bit of
the first byte. Two numbers of twelve bits take three bytes, and a number of eight bits takes one.

Shapes: R rows, C numbers of a field.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint16]
"""Numbers of one field in every row, shape (R, C)."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Field:
    """A field of a row: `count` numbers of `width` bits each. The width is at most 16."""

    count: int
    width: int


def row_bits(fields: Sequence[Field]) -> int:
    """The number of bits in a row."""
    return sum(field.count * field.width for field in fields)


def num_bytes(fields: Sequence[Field], num_rows: int) -> int:
    """The number of bytes of `num_rows` rows. Only the last byte may have bits to spare."""
    return -(-num_rows * row_bits(fields) // 8)


def pack(columns: Sequence[Numbers], fields: Sequence[Field]) -> Bytes:
    """Pack rows into bytes, shape (num_bytes,). Field i's numbers are `columns[i]`, and fit into its width."""
    bits = [_to_bits(column, field.width) for column, field in zip(columns, fields, strict=True)]
    return np.packbits(np.concatenate(bits, axis=1), bitorder="little")


def unpack(packed: Bytes, fields: Sequence[Field], num_rows: int) -> list[Numbers]:
    """The inverse of `pack`, for any bytes of the right length. Spare bits are ignored."""
    width = row_bits(fields)
    bits = np.unpackbits(packed, count=num_rows * width, bitorder="little").reshape(num_rows, width)
    columns, start = [], 0
    for field in fields:
        end = start + field.count * field.width
        columns.append(_from_bits(bits[:, start:end].reshape(num_rows, field.count, field.width)))
        start = end
    return columns


def _to_bits(numbers: Numbers, width: int) -> Bytes:
    """The bits of numbers of shape (R, C), in the shape (R, C * width)."""
    if width == 1:
        return numbers.astype(np.uint8)
    as_bytes = np.ascontiguousarray(numbers, dtype="<u2").view(np.uint8).reshape(*numbers.shape, 2)
    return np.unpackbits(as_bytes, axis=2, count=width, bitorder="little").reshape(
        len(numbers), numbers.shape[1] * width
    )


def _from_bits(bits: Bytes) -> Numbers:
    """The numbers, shape (R, C), that have these bits, shape (R, C, width)."""
    num_rows, count, width = bits.shape
    if width == 1:
        return bits[:, :, 0].astype(np.uint16)
    numbers = np.zeros((num_rows, count, 2), dtype=np.uint8)
    numbers[:, :, : -(-width // 8)] = np.packbits(bits, axis=2, bitorder="little")
    return numbers.view("<u2")[:, :, 0].astype(np.uint16)
