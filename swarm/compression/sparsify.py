"""Sparse codecs: they keep the k largest elements of each tile of 4096, or of the tile's cosine transform.

This file chooses the elements, writes where they lie, and puts them back; values.py writes their values. Both ways to
write the sorted places, which are below 4096, take the same number of bits for every tile.

Shapes: N elements of the part, T tiles, E = 4096 elements of a tile, K kept of each, R some of the tiles,
C columns that a tile is written in, X elements of a tile that may be kept, G elements of a group of kept ones.
"""

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch

from swarm.compression import values
from swarm.compression.buffers import TILE, Buffer, as_tensor, check_finite, in_chunks, slices
from swarm.compression.dct import dct, inverse_dct
from swarm.compression.values import Field, Numbers, Signs, Table, ValueCoder
from swarm.config.rounds import Indices, Values
from swarm.errors import MalformedMessage

Places = npt.NDArray[np.int16]
TILE_BITS = (TILE - 1).bit_length()
TILES_AT_ONCE = 256
"""How many tiles are handled together. It is a multiple of 8, so that each batch of tiles ends with a whole byte."""


class TwelveBit:
    """Twelve bits for each index, so two take three bytes."""

    def __init__(self, count: int) -> None:
        self.fields: tuple[Field, ...] = (Field(count, (TILE - 1).bit_length()),)

    def encode(self, indices_RG: Numbers) -> list[Numbers]:
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


class TopK:
    """Keeps the k elements of each tile with the largest magnitudes.

    A header comes first, and then the tiles as rows of bits without a gap: the indices of each group, and then the
    values. The kept elements of a tile are cut into groups by the rank of their magnitude. Within a group they are
    sorted by index.
    """

    tile = TILE
    needs_feedback = True
    is_sparse = True
    sketch_tolerance = 0.0

    def __init__(self, top_k: int, values: Values, indices: Indices, *, transform: bool) -> None:
        """`top_k`, `values` and `indices` are fields of AveragingConfig. `transform` says whether to choose among the
        coefficients of each tile's cosine transform."""
        self.name = "dct-topk" if transform else "topk"
        self._transform = transform
        self._top_k = top_k
        self._values = _value_coder(top_k, values)
        self._indices = [_index_coder(count, indices) for count in self._values.groups]
        self._fields = [*(field for coder in self._indices for field in coder.fields), *self._values.fields]

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        indices_TK, values_TK = self._choose(vector_N)
        is_real_TK = torch.ones_like(indices_TK, dtype=torch.bool)
        is_real_TK[-1:] = indices_TK[-1:] < self._num_real_in_last(vector_N.numel())
        header, value_columns = self._values.encode(values_TK, is_real_TK)
        encoded = bytearray(header)
        groups = [group.numpy().astype(np.uint16) for group in torch.split(indices_TK, self._values.groups, 1)]
        for rows in slices(len(indices_TK), TILES_AT_ONCE):
            columns = [
                column
                for coder, group in zip(self._indices, groups, strict=True)
                for column in coder.encode(group[rows])
            ]
            columns += [column[rows] for column in value_columns]
            encoded += values.pack(columns, self._fields).data
        return encoded

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """Put the kept elements back. All others are zero, and elements beyond the end of the vector are ignored.
        Raises MalformedMessage for a wrong length, indices out of order or in two groups, or values that are not
        finite."""
        what = f"{num_elements} elements of {self.name}"
        encoded = as_tensor(buffer, self.num_bytes(num_elements), what).numpy()
        table = self._values.read_header(encoded[: self._values.header_bytes])
        encoded = encoded[self._values.header_bytes :]
        vector_TE = torch.zeros(-(-num_elements // TILE), TILE)
        for rows in slices(len(vector_TE), TILES_AT_ONCE):
            tiles_RE = vector_TE[rows]
            num_bytes = values.num_bytes(self._fields, len(tiles_RE))
            columns = values.unpack(encoded[:num_bytes], self._fields, len(tiles_RE))
            encoded = encoded[num_bytes:]
            indices_RK = self._read_indices(columns)
            values_RK = self._values.decode(table, columns[-len(self._values.fields) :])
            tiles_RE.scatter_(1, torch.from_numpy(indices_RK.astype(np.int64)), torch.from_numpy(values_RK))
            if self._transform:
                tiles_RE.copy_(check_finite(inverse_dct(tiles_RE), what))
        return vector_TE.view(-1)[:num_elements]

    def num_bytes(self, num_elements: int) -> int:
        return self._values.header_bytes + values.num_bytes(self._fields, -(-num_elements // TILE))

    def _num_real_in_last(self, num_elements: int) -> int:
        """How many places of the last tile are no padding. No coefficient of a transform is padding."""
        return TILE if self._transform else num_elements - (num_elements - 1) // TILE * TILE

    def _choose(self, vector_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values of the largest elements of each tile, by groups, both of shape (T, K)."""
        indices: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _, tiles_RE in in_chunks(vector_N, TILE):
            if self._transform:
                tiles_RE = dct(tiles_RE)
            indices_RK = torch.from_numpy(_largest(tiles_RE, self._values.groups))
            indices.append(indices_RK)
            values.append(tiles_RE.gather(1, indices_RK.long()))
        if not indices:
            return torch.empty(0, self._top_k, dtype=torch.int16), torch.empty(0, self._top_k)
        return torch.cat(indices), torch.cat(values)

    def _read_indices(self, columns: Sequence[Numbers]) -> Numbers:
        """Indices of some tiles, by groups, shape (R, K)."""
        groups, start = [], 0
        for coder in self._indices:
            groups.append(coder.decode(columns[start : start + len(coder.fields)]))
            start += len(coder.fields)
        indices_RK = np.concatenate(groups, axis=1)
        if len(groups) > 1:
            sorted_RK = np.sort(indices_RK, axis=1)
            if (sorted_RK[:, 1:] == sorted_RK[:, :-1]).any():
                raise MalformedMessage("an element of a tile is kept twice")
        return indices_RK


def _largest(tiles_RE: torch.Tensor, groups: Sequence[int]) -> Places:
    """The places of the largest magnitudes in each tile, shape (R, K): the largest group first, each group sorted.

    Among equal magnitudes the one at the lower place counts as larger. So the choice follows from the numbers alone,
    and padding is chosen after every real zero. NaN counts as the largest of all.

    Sorting whole tiles would take most of a codec's time. So a bound that at least K elements reach is found first: a
    tile is laid out in a few rows, and the bound is the K-th largest of the columns' maxima. As a rule few more than K
    elements reach the bound, and only these are sorted.
    """
    num_kept, num_tiles = sum(groups), len(tiles_RE)
    # There are about four columns for each element that has to be found, or as many columns as elements.
    num_rows = 1 << max(0, (TILE // (4 * num_kept)).bit_length() - 1)
    magnitudes_RE = tiles_RE.abs()
    maxima_RC = magnitudes_RE.view(num_tiles, num_rows, -1).amax(1).numpy()
    bound = maxima_RC.shape[1] - num_kept
    bounds_R1 = np.partition(maxima_RC, bound, axis=1)[:, bound, None]
    # "Not less" instead of "greater or equal" keeps NaN, which is not less than anything.
    reaches_RE = ~np.less(magnitudes_RE.numpy(), bounds_R1)
    places = _true_places(reaches_RE)
    # The bits of magnitudes, read as integers, are ordered as the magnitudes are. The place makes all ranks different.
    ranks = magnitudes_RE.view(torch.int32).numpy().reshape(-1)[places].astype(np.int64)
    ranks = ranks << TILE_BITS | (~places & TILE - 1)
    counts_R = np.diff(np.searchsorted(places, TILE * np.arange(num_tiles + 1)))
    ranks_RX = np.full((num_tiles, counts_R.max()), -1)
    ranks_RX[np.arange(counts_R.max()) < counts_R[:, None]] = ranks
    ranks_RX.sort(axis=1)
    indices_RK = (~ranks_RX[:, : -num_kept - 1 : -1] & TILE - 1).astype(np.int16)
    return np.concatenate([np.sort(group, axis=1) for group in np.split(indices_RK, np.cumsum(groups)[:-1], axis=1)], 1)


def _true_places(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The result of np.flatnonzero, in a third of its time if few elements are true. The mask has 8 * n elements."""
    words = np.flatnonzero(mask.reshape(-1).view(np.uint64) != 0)
    in_words = np.flatnonzero(mask.reshape(-1, 8)[words])
    places: npt.NDArray[np.int64] = 8 * words[in_words >> 3] + (in_words & 7)
    return places


def _value_coder(top_k: int, values: Values) -> ValueCoder:
    match values:
        case "lut8":
            return Table(top_k)
        case "2bit":
            return Signs([top_k // 4, top_k - top_k // 4])
        case "sign":
            return Signs([top_k])
        case other:
            assert_never(other)


def _index_coder(count: int, indices: Indices) -> IndexCoder:
    match indices:
        case "12bit":
            return TwelveBit(count)
        case "elias-fano":
            return EliasFano(count)
        case other:
            assert_never(other)
