"""Tile order: one vector of all tensors, in which 4096 consecutive elements are a 64 x 64 tile of one matrix.

averaging/ uses it for averaged tensors. So each tile that a codec gets is part of one matrix, and codecs need not know
the tensors. The full tiles of the matrices come first, in the order of the matrices' names: row by row of tiles, and
each tile row by row. The rest of all tensors follows, again in the order of their names: of a matrix the strip to the
right of its full tiles and then the strip below them, and all of a vector. A tensor of more dimensions counts as a
matrix of shape (first, all the others).

Shapes: D elements of all tensors.
"""

from collections.abc import Iterator, Mapping

import torch
from einops import rearrange

SIDE = 64
"""Rows and columns of a tile."""
TILE = SIDE * SIDE
"""Elements of a tile."""


def concatenate(tensors: Mapping[str, torch.Tensor], out_D: torch.Tensor) -> torch.Tensor:
    """Write the tensors into a float32 vector one after the other, for codecs without tiles, and return the vector."""
    for name, piece in cut(out_D, tensors).items():
        piece.copy_(tensors[name].detach())
    return out_D


def cut(vector_D: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `concatenate`: views of the vector, with the names and shapes of `like`."""
    names = sorted(like)
    pieces = torch.split(vector_D, [like[name].numel() for name in names])
    return {name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)}


def flatten(tensors: Mapping[str, torch.Tensor], out_D: torch.Tensor) -> torch.Tensor:
    """Write the tensors into a float32 vector in tile order, and return the vector."""
    for target, piece in _pieces(out_D, tensors):
        target.copy_(piece.detach())
    return out_D


def unflatten(vector_D: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `flatten`: new float32 tensors on the CPU, with the names and shapes of `like`."""
    tensors = {name: torch.empty(tensor.shape) for name, tensor in like.items()}
    for source, piece in _pieces(vector_D, tensors):
        piece.copy_(source)
    return tensors


def _pieces(vector_D: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views of the same shape: a part of the vector, and the part of a tensor that belongs there."""
    matrices = [_matrix(tensors[name]) for name in sorted(tensors)]
    start = 0
    for matrix in matrices:
        rows, columns = (SIDE * (length // SIDE) for length in matrix.shape)
        tiles = matrix[:rows, :columns]
        part = vector_D[start : start + tiles.numel()].view(rows // SIDE, columns // SIDE, SIDE, SIDE)
        yield rearrange(part, "row column h w -> row h column w"), _tiled(tiles)
        start += tiles.numel()
    for matrix in matrices:
        rows, columns = (SIDE * (length // SIDE) for length in matrix.shape)
        for strip in (matrix[:rows, columns:], matrix[rows:]):
            yield vector_D[start : start + strip.numel()].view(strip.shape), strip
            start += strip.numel()


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A view with two dimensions. A vector becomes a single row, which has no full tile."""
    return tensor.flatten(1) if tensor.ndim >= 2 else tensor.view(1, -1)


def _tiled(matrix: torch.Tensor) -> torch.Tensor:
    return rearrange(matrix, "(row h) (column w) -> row h column w", h=SIDE, w=SIDE)
