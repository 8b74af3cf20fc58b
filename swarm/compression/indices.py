"""Where the kept elements of a tile lie: two ways to write sorted numbers below 4096.

Used by sparsify.py, once for each group of kept elements. Both take the same number of bits for every tile.

Shapes: R tiles, G elements of the group.
"""

from collections.abc import Sequence

import numpy as np

from swarm.compression.layout import TILE
from swarm.compression.packing import Field, Numbers
from swarm.errors import MalformedMessage


class TwelveBit:
    """Twelve bits for each index, so two take three bytes."""

    def __init__(self, count: int) -> None:
        self.fields: tuple[Field, ...] = (Field(count, (TILE - 1).bit_length()),)

    def encode(self, indices_RG: Numbers) -> list[Numbers]:
        """The columns of `fields`: rising numbers below 4096 as they are."""
        return [indices_RG]

    def decode(self, columns: Sequence[Numbers]) -> Numbers:
        """The inverse of `encode`. Raises MalformedMessage for columns that no encoder writes."""
        return _check_rising(columns[0])


class EliasFano:
    """The code of Elias (1974) and Fano (1971): near the entropy of evenly spread indices, yet of a fixed size.

    Of G numbers below u = 4096, the lowest l = floor(log2(u / G)) bits are written as they are. The rest, a number
    below u / 2^l, is unary: bit (rest + i) is set for the i-th number, in a row of G + u / 2^l - 1 bits. 16 indices
    take 159 bits, and 48 of them take 399.
    """

    def __init__(self, count: int) -> None:
        self._low_bits = np.uint16((TILE // count).bit_length() - 1)
        self._ranks_G = np.arange(count, dtype=np.uint16)
        self._unary_bits = count + (TILE >> int(self._low_bits)) - 1
        self.fields: tuple[Field, ...] = (Field(count, int(self._low_bits)), Field(self._unary_bits, 1))

    def encode(self, indices_RG: Numbers) -> list[Numbers]:
        """The columns of `fields`: the low bits, and the unary rows."""
        unary = np.zeros((len(indices_RG), self._unary_bits), dtype=np.uint16)
        np.put_along_axis(unary, (indices_RG >> self._low_bits) + self._ranks_G, 1, axis=1)
        return [indices_RG & ((1 << self._low_bits) - 1), unary]

    def decode(self, columns: Sequence[Numbers]) -> Numbers:
        """Put both parts together. Raises MalformedMessage if a row has too many or few ones, or the numbers fall."""
        low_RG, unary = columns
        if (np.count_nonzero(unary, axis=1) != len(self._ranks_G)).any():
            raise MalformedMessage(f"an Elias-Fano row does not have {len(self._ranks_G)} ones")
        # A row with the right number of ones has u / 2^l - 1 zeros, so no rest can exceed its range.
        places_RG = np.nonzero(unary)[1].reshape(low_RG.shape).astype(np.uint16)
        return _check_rising((places_RG - self._ranks_G << self._low_bits) | low_RG)


IndexCoder = TwelveBit | EliasFano


def _check_rising(indices_RG: Numbers) -> Numbers:
    if (indices_RG[:, 1:] <= indices_RG[:, :-1]).any():
        raise MalformedMessage("the indices of a tile do not rise")
    return indices_RG
