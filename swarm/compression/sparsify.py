"""Sparse codecs: of each tile of 4096 elements the k largest, or of its cosine transform.

codec.py picks one. indices.py and values.py write what is kept; here it is chosen, and put back.

Shapes: N elements of the part, T tiles, E = 4096 elements of a tile, K kept of each, R some of the tiles.
"""

from collections.abc import Sequence

import numpy as np
import torch

from swarm.compression import packing
from swarm.compression.buffers import Buffer, as_tensor, check_finite, in_chunks, slices
from swarm.compression.dct import dct, inverse_dct
from swarm.compression.indices import EliasFano, IndexCoder, TwelveBit
from swarm.compression.layout import TILE
from swarm.compression.packing import Numbers
from swarm.compression.values import Signs, Table, ValueCoder
from swarm.errors import MalformedMessage

TILES_AT_ONCE = 256
"""A multiple of 8, so that so many tiles end with a byte."""


class TopK:
    """The k largest of each tile, by magnitude.

    A header, then the tiles as rows of bits without a gap: the indices of each group, then the values. A group is a
    run of the tile's kept elements by rank of their magnitude, and sorted by index.
    """

    tile = TILE
    needs_feedback = True
    is_sparse = True

    def __init__(self, top_k: int, values: str, indices: str, *, transform: bool) -> None:
        """Of AveragingConfig, whose fields have these names.

        Args:
            transform: choose among the coefficients of each tile's cosine transform.
        """
        self.name = "dct-topk" if transform else "topk"
        self._transform = transform
        self._top_k = top_k
        self._values = _value_coder(top_k, values)
        self._indices: list[IndexCoder] = [
            EliasFano(count) if indices == "elias-fano" else TwelveBit(count) for count in self._values.groups
        ]
        self._fields = [*(field for coder in self._indices for field in coder.fields), *self._values.fields]

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        """Choose and pack."""
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
            encoded += packing.pack(columns, self._fields).data
        return encoded

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """Put the kept elements back; all others are zero. What lies beyond the vector in its last tile is ignored.

        Raises:
            MalformedMessage: a wrong length, indices out of order or in two groups, or values that are not finite.
        """
        what = f"{num_elements} elements of {self.name}"
        encoded = as_tensor(buffer, self.num_bytes(num_elements), what).numpy()
        table = self._values.read_header(encoded[: self._values.header_bytes])
        encoded = encoded[self._values.header_bytes :]
        vector_TE = torch.zeros(-(-num_elements // TILE), TILE)
        for rows in slices(len(vector_TE), TILES_AT_ONCE):
            tiles_RE = vector_TE[rows]
            num_bytes = packing.num_bytes(self._fields, len(tiles_RE))
            columns = packing.unpack(encoded[:num_bytes], self._fields, len(tiles_RE))
            encoded = encoded[num_bytes:]
            indices_RK = self._read_indices(columns)
            values_RK = self._values.decode(table, columns[-len(self._values.fields) :])
            tiles_RE.scatter_(1, torch.from_numpy(indices_RK.astype(np.int64)), torch.from_numpy(values_RK))
            if self._transform:
                tiles_RE.copy_(check_finite(inverse_dct(tiles_RE), what))
        return vector_TE.view(-1)[:num_elements]

    def num_bytes(self, num_elements: int) -> int:
        """Exact size: the header and whole tiles."""
        return self._values.header_bytes + packing.num_bytes(self._fields, -(-num_elements // TILE))

    def _num_real_in_last(self, num_elements: int) -> int:
        """Places of the last tile that are no padding; every coefficient of a transform is real."""
        return TILE if self._transform else num_elements - (num_elements - 1) // TILE * TILE

    def _choose(self, vector_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values of the largest of each tile, by groups; shape (T, K)."""
        indices: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for rows, tiles_RE in in_chunks(vector_N, TILE):
            if self._transform:
                tiles_RE = dct(tiles_RE)
            magnitudes_RE = tiles_RE.abs()
            if rows.stop * TILE > vector_N.numel() and not self._transform:
                # Padding is chosen last, after every zero that is real.
                magnitudes_RE[-1, vector_N.numel() % TILE :] = -1
            ranked_RK = magnitudes_RE.topk(self._top_k, dim=1).indices
            sorted_RK = torch.cat([group.sort(1).values for group in torch.split(ranked_RK, self._values.groups, 1)], 1)
            indices.append(sorted_RK.to(torch.int16))
            values.append(tiles_RE.gather(1, sorted_RK))
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


def _value_coder(top_k: int, values: str) -> ValueCoder:
    if values == "lut8":
        return Table(top_k)
    return Signs([top_k // 4, top_k - top_k // 4] if values == "2bit" else [top_k])
