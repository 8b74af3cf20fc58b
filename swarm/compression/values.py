"""The values of a tile's kept elements, and numbers of a few bits packed without gaps.

Two codings of values look numbers up in a table of 256; the header before the tiles holds the table, or the one number
that it follows from. Packed rows of fields become one stream of bits, little-endian: the first number begins in the
lowest bit of the first byte. Two numbers of twelve bits take three bytes, and a number of eight bits takes one.

Shapes: T tiles, K kept elements of a tile, R some of the tiles or rows, C numbers of a field.
"""

import itertools
import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import MalformedMessage

Numbers = npt.NDArray[np.uint16]
"""Numbers of one field in every row, shape (R, C)."""
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
LEVELS_PER_OCTAVE = 16
_ROOT = math.sqrt(math.sqrt(math.sqrt(math.sqrt(0.5))))
# Roots and products are rounded in the same way on every processor, but powers may not be.
_POWERS = [*itertools.accumulate(itertools.repeat(_ROOT, 254), operator.mul, initial=1.0), 0.0]
LEVELS = np.array(_POWERS, dtype=np.float32)
"""Magnitudes relative to the largest one: 2 ** (-code / 16), and zero for the last code."""


@dataclass(frozen=True)
class Field:
    """A field of a row: `count` numbers of `width` bits each. The width is at most 16."""

    count: int
    width: int


def row_bits(fields: Sequence[Field]) -> int:
    return sum(field.count * field.width for field in fields)


def num_bytes(fields: Sequence[Field], num_rows: int) -> int:
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


class Signs:
    """A sign for each element, and the mean magnitude of each group of a tile.

    Magnitudes are 8-bit codes on a logarithmic scale, relative to the largest one of the part. They are exact within
    2.2 %, down to 1/60,000 of the largest. Smaller ones become zero.
    """

    header_bytes = 4

    def __init__(self, groups: list[int]) -> None:
        """
        Args:
            groups: how many elements each group of a tile has. The first group has the largest ones.
        """
        self.groups = groups
        self.fields: tuple[Field, ...] = (Field(len(groups), 8), Field(sum(groups), 1))

    def encode(self, values_TK: torch.Tensor, is_real_TK: torch.Tensor) -> tuple[bytes, list[Numbers]]:
        """The largest magnitude as header; codes and signs, the columns of `fields`.

        Values that are not real are padding. The mean is the magnitude with the least error for a group.
        """
        # No sum overflows in float64.
        sums = torch.split(values_TK.abs().double() * is_real_TK, self.groups, 1)
        counts = torch.split(is_real_TK, self.groups, 1)
        means = [s.sum(1) / c.sum(1).clamp(min=1) for s, c in zip(sums, counts, strict=True)]
        means_TG = torch.stack(means, 1).float()
        largest = means_TG.max() if means_TG.numel() else torch.zeros(())
        codes_TG = torch.log2(means_TG / largest).mul(-LEVELS_PER_OCTAVE).round_()
        is_zero_TG = (means_TG == 0) | (codes_TG >= len(LEVELS) - 1)
        codes_TG = torch.where(is_zero_TG, len(LEVELS) - 1, codes_TG).to(torch.uint8)
        return struct.pack("<f", largest), [
            codes_TG.numpy().astype(np.uint16),
            (values_TK < 0).numpy().astype(np.uint16),
        ]

    def read_header(self, header: Bytes) -> Floats:
        """The 256 values: the levels times the largest magnitude. Raises MalformedMessage unless that is finite."""
        largest = header.view("<f4")[0]
        if not (np.isfinite(largest) and largest >= 0):
            raise MalformedMessage("the largest magnitude is not a finite number")
        table: Floats = LEVELS * largest
        return table

    def decode(self, table: Floats, columns: Sequence[Numbers]) -> Floats:
        """Give each element the magnitude of its group, with its own sign."""
        codes_RG, is_negative_RK = columns
        magnitudes_RK = np.repeat(table[codes_RG], self.groups, axis=1)
        return np.where(is_negative_RK, -magnitudes_RK, magnitudes_RK)


class Table:
    """A byte for each element, which is an index into a table of 256 values that is made for the part.

    256 bins of equal width span three standard deviations to both sides of the mean, and a bin's entry in the table is
    the mean of the values in it. This is the quantiser of the templar trainer (CCLoco, SparseLoCo), and of hivemind's
    uniform 8 bits.
    """

    header_bytes = 4 * 256

    def __init__(self, count: int) -> None:
        self.groups = [count]
        self.fields: tuple[Field, ...] = (Field(count, 8),)

    def encode(self, values_TK: torch.Tensor, is_real_TK: torch.Tensor) -> tuple[bytes, list[Numbers]]:
        """The table as header, and the codes. Values that are not real are padding."""
        codes, table = quantize_statistically(values_TK[is_real_TK].numpy(), 256)
        all_codes_TK = np.zeros(values_TK.shape, dtype=np.uint16)
        all_codes_TK[is_real_TK.numpy()] = codes
        return table.astype("<f4").tobytes(), [all_codes_TK]

    def read_header(self, header: Bytes) -> Floats:
        """The table of 256 values. Raises MalformedMessage unless they are finite."""
        table = header.view("<f4").astype(np.float32)
        if not np.isfinite(table).all():
            raise MalformedMessage("a table of values holds NaN or infinity")
        return table

    def decode(self, table: Floats, columns: Sequence[Numbers]) -> Floats:
        return table[columns[0]]


ValueCoder = Signs | Table


def quantize_statistically(values: Floats, num_bins: int) -> tuple[Numbers, Floats]:
    """The codes of the values, shaped as `values`, and the mean of the values of each code, shape (num_bins,).

    This is the statistical quantiser of the templar trainer. A bin is 6 standard deviations / num_bins wide, the middle
    one is at the mean, and the outer ones are open. In templar the table is relative to the mean; here it is not.
    """
    shift = values.mean(dtype=np.float64) if values.size else 0.0
    centred = values.astype(np.float64) - shift
    scale = 6 * math.sqrt(float(np.square(centred).sum()) / max(1, values.size - 1)) / num_bins
    if not (math.isfinite(scale) and scale > 0):
        scale = 1.0
    codes = np.clip(np.rint(centred / scale + num_bins // 2), 0, num_bins - 1)
    codes = np.nan_to_num(codes).astype(np.uint16)
    counts = np.bincount(codes.ravel(), minlength=num_bins)
    sums = np.bincount(codes.ravel(), weights=centred.ravel(), minlength=num_bins)
    return codes, (sums / np.maximum(counts, 1) + shift).astype(np.float32)
