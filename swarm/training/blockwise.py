"""Tensors in 8 bits: blocks of numbers, each of them a code beside the block's largest number (arXiv 2110.02861).

Dynamic quantisation: a code is one of 256 values between -1 and 1 (or 0 and 1), close together near 0 and at most 1.4 %
of the largest apart near 1. A block's number is its code's value times the block's largest number, with its sign, which
therefore stays exact. So a tensor that was read and is written again has the same codes, and every member of a stage
gets the same codes from the same numbers: these are quotients, and comparisons with the middles between two values.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from swarm.training.elementwise import Work, treat_rows

BLOCK = 256
"""Numbers of one block. The paper has 2,048; bitsandbytes has 256 by now, which costs 1.6 % more memory."""
LEAST = 2.0**-100
"""Blocks with a smaller largest number become 0: products with the smallest value would lose bits, or be 0."""
_DECADES = 7


class Table:
    """The values of the codes, in order, and how numbers find their nearest one. `signed` says whether there are
    negative values. Without them, a number above 0 never becomes 0: it is a second moment then, whose root divides."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        above = [*map(float, _magnitudes(0 if signed else 1)), 1.0]
        below = [-value for value in above[-2::-1]] if signed else []
        self.values = np.array([*below, 0.0, *above], np.float32)
        assert len(self.values) == 256
        middles = ((self.values[:-1].astype(np.float64) + self.values[1:]) / 2).astype(np.float32)
        if not signed:
            middles[0] = 0.0
        self.zero = int(np.searchsorted(self.values, 0.0))
        # The upper 16 bits of a float32 leave at most two codes, and one middle between them.
        least = np.arange(1 << 16, dtype=np.uint32) << 16
        ends = np.stack([least.view(np.float32), (least | 0xFFFF).view(np.float32)])
        self._codes = np.searchsorted(middles, np.fmin(*ends)).astype(np.uint8)
        self._middles_of_cells = np.append(middles, np.float32(np.inf))[self._codes]
        self.middles = middles

    def decode(self, codes: Any, scales: Any) -> Any:
        """The numbers of rows of codes, of which each has one scale; all of them arrays, or tensors of one device."""
        if isinstance(codes, np.ndarray):
            numbers = self.values.take(codes)
            return np.multiply(numbers, scales, out=numbers)
        values, _ = _on_device(self, codes.device)
        return values.index_select(0, codes.reshape(-1).int()).view(codes.shape).mul_(scales)

    def encode(self, numbers: Any, codes: Any, scales: Any) -> None:
        """Write the codes and scales of rows of float32 numbers. NaN and infinity make NaNs of all their block."""
        xp = np if isinstance(codes, np.ndarray) else torch
        largest = xp.amax(numbers, 1)[:, None]
        if self.signed:
            smallest = xp.amin(numbers, 1)[:, None]
            largest = xp.where(largest < -smallest, smallest, largest)
        is_zero = abs(largest) < LEAST
        scales[:] = xp.where(is_zero, 0.0, largest)
        scaled = numbers / xp.where(is_zero, np.inf, largest)
        if xp is np:
            cells = scaled.view(np.uint32) >> 16
            np.add(self._codes.take(cells), scaled > self._middles_of_cells.take(cells), out=codes, casting="unsafe")
        else:
            codes[:] = torch.bucketize(scaled, _on_device(self, codes.device)[1], out_int32=True)


def _magnitudes(spare_bits: int) -> Iterator[Fraction]:
    """The paper's values above 0, but for 1: each decade has twice the values of the one below it, and they are the
    middles of equal parts of the decade. There is a spare bit, and so twice the values, where none is for the sign."""
    for decade in range(_DECADES):
        num_values = 1 << (decade + spare_bits)
        for number in range(num_values):
            share = Fraction(2 * number + 1, 2 * num_values)
            yield (Fraction(1, 10) + Fraction(9, 10) * share) / 10 ** (_DECADES - 1 - decade)


@lru_cache
def _on_device(table: Table, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(table.values).to(device), torch.from_numpy(table.middles).to(device)


SIGNED, UNSIGNED = Table(signed=True), Table(signed=False)


class Packed:
    """A tensor of a shape as codes and scales, at first of zeros."""

    def __init__(self, table: Table, shape: torch.Size, device: torch.device) -> None:
        self.shape, self._table = shape, table
        self._codes = torch.full((shape.numel(),), table.zero, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(-(-shape.numel() // BLOCK), device=device)

    @staticmethod
    def num_bytes(num_elements: int) -> int:
        return num_elements + 4 * -(-num_elements // BLOCK)

    def rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The codes as `rows_of` cuts them, and the scale of each row; to be read or written."""
        parts = rows_of(self._codes)
        return list(zip(parts, torch.split(self._scales[:, None], [len(part) for part in parts]), strict=True))

    def unpacked(self, device: torch.device | None = None) -> torch.Tensor:
        """The numbers, in memory of their own, on the same device or another one."""
        numbers = torch.empty(self.shape, device=device or self._codes.device)
        for row, packed in zip(rows_of(numbers.view(-1)), self.rows(), strict=True):
            treat_rows(self._decode, [row, *(tensor.to(numbers.device) for tensor in packed)])
        return numbers

    def pack(self, numbers: torch.Tensor) -> None:
        for row, packed in zip(rows_of(numbers.detach().reshape(-1)), self.rows(), strict=True):
            treat_rows(self._encode, [row, *packed])

    def _decode(self, xp: Any, scratch: Any, numbers: Any, codes: Any, scales: Any) -> None:
        numbers[:] = self._table.decode(codes, scales)

    def _encode(self, xp: Any, scratch: Any, numbers: Any, codes: Any, scales: Any) -> None:
        self._table.encode(numbers, codes, scales)


def rows_of(flat: torch.Tensor) -> list[torch.Tensor]:
    """A vector's whole blocks as rows, and then the last one, if it is not whole; those that there are."""
    whole = flat.numel() // BLOCK * BLOCK
    return [rows for rows in (flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)) if rows.numel()]


def step_packed(
    xp: Any, scratch: Any, weights: Any, gradient: Any,
    first: Any, first_scales: Any, second: Any, second_scales: Any, *, step: Work,
) -> None:  # fmt: skip
    """Take an optimizer's step with moments that are held as codes and scales: a Work on rows of a matrix."""
    moments = SIGNED.decode(first, first_scales), UNSIGNED.decode(second, second_scales)
    step(xp, scratch, weights, gradient, *moments)
    SIGNED.encode(moments[0], first, first_scales)
    UNSIGNED.encode(moments[1], second, second_scales)
