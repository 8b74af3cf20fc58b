"""Vectors as codecs handle them: tensors in tile order, bytes as tensors, chunks, and the checks of every decoder.

Shapes: D elements of all tensors, N elements, R rows, E elements of a row (a block or a tile).
"""

import math
from collections.abc import Iterator, Mapping

import torch
from einops import rearrange

from swarm.errors import MalformedMessage

SIDE = 64
"""Rows and columns of a tile."""
TILE = SIDE * SIDE
"""Elements of a tile."""
Buffer = bytes | bytearray | memoryview
CHUNK_ELEMENTS = 1 << 18
"""The number of elements that a codec handles at a time, so that its temporaries stay in the processor's cache. With a
quarter of this number, a codec took one and a half times as long."""
SMALLEST_SCALE = 2.0**-120
"""Elements with a smaller scale become zero, because its reciprocal might overflow."""
LARGEST_SCALE = 2.0**100
"""The largest scale with which no decoded number overflows. Encoders clamp larger ones."""


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
    """Write the tensors into a float32 vector in tile order, and return the vector.

    4096 consecutive elements are a 64 x 64 tile of one matrix, so that codecs need not know the tensors. The full tiles
    of the matrices come first, in the order of the matrices' names: row by row of tiles, and each tile row by row. The
    rest of all tensors follows in that order: of a matrix the strip to the right of its full tiles and then the strip
    below them, and all of a vector. A tensor of more dimensions counts as a matrix of shape (first, all the others).
    """
    for target, piece in _pieces(out_D, tensors):
        target.copy_(piece.detach())
    return out_D


def unflatten(vector_D: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `flatten`: new float32 tensors on the CPU, with the names and shapes of `like`."""
    tensors = {name: torch.empty(tensor.shape) for name, tensor in like.items()}
    for source, piece in _pieces(vector_D, tensors):
        piece.copy_(source)
    return tensors


def places(like: Mapping[str, torch.Tensor], *, is_tiled: bool) -> Iterator[tuple[str, slice]]:
    """The places of tensors in their vector, by name, as `flatten` or `concatenate` writes them. What `flatten` writes
    behind the full tiles has no name."""
    start = 0
    for name in sorted(like):
        length = like[name].numel()
        if is_tiled:
            rows, columns = _matrix(like[name]).shape
            length = (rows // SIDE) * (columns // SIDE) * TILE
        yield name, slice(start, start + length)
        start += length
    if (end := sum(tensor.numel() for tensor in like.values())) > start:
        yield "", slice(start, end)


def _pieces(vector_D: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views of the same shape: a part of the vector, and the part of a tensor that belongs there."""
    matrices = [_matrix(tensors[name]) for name in sorted(tensors)]
    start = 0
    for matrix in matrices:
        rows, columns = (SIDE * (length // SIDE) for length in matrix.shape)
        tiles = matrix[:rows, :columns]
        part = vector_D[start : start + tiles.numel()].view(rows // SIDE, columns // SIDE, SIDE, SIDE)
        as_tiles = rearrange(tiles, "(row h) (column w) -> row h column w", h=SIDE, w=SIDE)
        yield rearrange(part, "row column h w -> row h column w"), as_tiles
        start += tiles.numel()
    for matrix in matrices:
        rows, columns = (SIDE * (length // SIDE) for length in matrix.shape)
        for strip in (matrix[:rows, columns:], matrix[rows:]):
            yield vector_D[start : start + strip.numel()].view(strip.shape), strip
            start += strip.numel()


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A view with two dimensions. A vector becomes a single row, which has no full tile."""
    return tensor.flatten(1) if tensor.ndim >= 2 else tensor.view(1, -1)


def as_tensor(buffer: Buffer, num_bytes: int, what: str) -> torch.Tensor:
    """The bytes as uint8, shape (num_bytes,), without a copy if the buffer is writable. `what` names the contents in an
    error. Raises MalformedMessage if the buffer is not `num_bytes` long."""
    view = memoryview(buffer)
    if view.nbytes != num_bytes:
        raise MalformedMessage(f"{what} takes {num_bytes} bytes, not {view.nbytes}")
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # torch wants writable memory, which bytes are not.
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def check_finite(vector_N: torch.Tensor, what: str) -> torch.Tensor:
    """Return the vector. Raises MalformedMessage, which names `what`, if it holds NaN or infinity."""
    # aminmax passes NaN on, and is many times faster than isfinite on every element.
    if vector_N.numel() and not all(math.isfinite(extreme) for extreme in torch.aminmax(vector_N)):
        raise MalformedMessage(f"{what} holds NaN or infinity")
    return vector_N


def clamp_scales(scales_R: torch.Tensor) -> torch.Tensor:
    """Bring scales into the range that may be sent: at most LARGEST_SCALE, and zero below SMALLEST_SCALE."""
    return torch.where(scales_R < SMALLEST_SCALE, 0.0, scales_R.clamp(max=LARGEST_SCALE))


def reciprocals(scales_R: torch.Tensor) -> torch.Tensor:
    return torch.where(scales_R == 0, 0.0, 1 / scales_R)


def check_scales(scales_R: torch.Tensor, what: str) -> torch.Tensor:
    """Return the scales as float32. Raises MalformedMessage if one is not between 0 and LARGEST_SCALE."""
    scales_R = scales_R.float()
    if scales_R.numel():
        low, high = torch.aminmax(scales_R)
        if not 0 <= float(low) <= float(high) <= LARGEST_SCALE:
            raise MalformedMessage(f"a scale of {what} is not a number between 0 and {LARGEST_SCALE:.1e}")
    return scales_R


def slices(length: int, size: int) -> Iterator[slice]:
    """Cut a length into pieces of `size`, of which the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def in_chunks(vector_N: torch.Tensor, width: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Cut a vector into rows of `width` elements, and yield some rows at a time: the slice of rows, and their elements
    (R, E).

    The last row is filled up with zeros.
    """
    num_rows = -(-vector_N.numel() // width)
    for rows in slices(num_rows, CHUNK_ELEMENTS // width):
        piece_N = vector_N.detach()[rows.start * width : rows.stop * width]
        missing = (rows.stop - rows.start) * width - piece_N.numel()
        if missing:
            piece_N = torch.nn.functional.pad(piece_N, (0, missing))
        yield rows, piece_N.view(-1, width)


class Received:
    """Collects bytes that come in pieces, and whose number is known beforehand."""

    def __init__(self, num_bytes: int) -> None:
        # A bytearray would be filled with zeros first.
        self._memory: memoryview = torch.empty(num_bytes, dtype=torch.uint8).numpy().data
        self._num_filled = 0

    def add(self, piece: bytes) -> None:
        """Take the next bytes. Raises MalformedMessage if they are too many."""
        end = self._num_filled + len(piece)
        if end > len(self._memory):
            raise MalformedMessage(f"{len(self._memory)} bytes are expected, {end} came")
        self._memory[self._num_filled : end] = piece
        self._num_filled = end

    def whole(self) -> memoryview:
        """All bytes, once they are here. Raises MalformedMessage if some are missing."""
        if self._num_filled < len(self._memory):
            raise MalformedMessage(f"{len(self._memory)} bytes are expected, {self._num_filled} came")
        return self._memory
