"""The discrete cosine transform of tiles, and the codec that keeps its low frequencies.

sparsify.py uses the transform as well. It is the orthonormal DCT-II of a tile seen as 64 x 64, along both axes, as two
matrix products. Different processors add up a product's terms in different orders and round differently. That does not
matter in encoding, because each vector has one sender. But members must decode the same bytes to the same bits. So the
inverse multiplies whole numbers that are so small that float64 holds every sum of their products exactly. Then nothing
is rounded, and the order makes no difference.

Shapes: T tiles, E = 4096 elements of a tile, F = 2048 frequencies kept.
"""

import functools
import math

import torch

from swarm.compression.buffers import (
    CHUNK_ELEMENTS,
    Buffer,
    as_tensor,
    check_finite,
    check_scales,
    clamp_scales,
    in_chunks,
    reciprocals,
    slices,
)
from swarm.compression.layout import SIDE, TILE

FACTOR_BITS = 25
"""The inverse's cosines (`_whole_factors`) are whole multiples of 2**-25, and less than 0.18."""
TERM_BITS = 23
"""What they are multiplied by is a whole multiple of 2**-23 times a power of two, and less than twice that power. So 64
products add up to less than 64 * 0.18 * 2**(25 + 24), which is below 2**53."""


def dct(tiles_TE: torch.Tensor) -> torch.Tensor:
    """Coefficients of the tiles, shape (T, E). The frequency along a tile's rows is the slower index."""
    matrix = _matrix()
    return (matrix @ (tiles_TE.view(-1, SIDE, SIDE) @ matrix.T)).view(-1, TILE)


def inverse_dct(coefficients_TE: torch.Tensor) -> torch.Tensor:
    """The tiles, shape (T, E): the same bits on every processor, within 1e-6 of a tile's norm."""
    factors = _whole_factors()
    terms, unit_T11 = _whole_terms(coefficients_TE.double().view(-1, SIDE, SIDE))
    terms, next_unit_T11 = _whole_terms(terms @ factors)
    unit_T11 *= next_unit_T11 * 2.0 ** (-2 * FACTOR_BITS)
    # The sign of a sum of nothing but zeros does depend on the order. Adding 0 makes it positive.
    return (factors.T @ terms).mul_(unit_T11).add_(0.0).float().view(-1, TILE)


def _whole_terms(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each tile's numbers as whole multiples of a power of two, and the powers (T, 1, 1). Writes to the tiles."""
    largest_T11 = tiles.abs().amax((1, 2), keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    # Without its mantissa's bits a positive float64 is a power of two.
    power_T11 = (largest_T11.view(torch.int64) >> 52 << 52).view(torch.float64)
    return tiles.mul_(2.0**TERM_BITS / power_T11).round_(), power_T11 * 2.0**-TERM_BITS


class DctLowpass:
    """Keeps the half of each tile's coefficients with the lowest frequencies, as float16 relative to the largest one.

    The float32 scales of all tiles come first, and then the float16 numbers of all tiles, in rising order of the sum of
    both frequencies, and then of the first. The last tile is filled up with zeros. The filter is that of torchrun-ddp.
    """

    name = "dct-lowpass"
    tile = TILE
    needs_feedback = True
    is_sparse = False

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        """Transform, choose, and scale to at most 1."""
        encoded = torch.empty(self.num_bytes(vector_N.numel()), dtype=torch.uint8)
        all_scales_T, all_halves_TF = self._split(encoded, vector_N.numel())
        for rows, tiles_TE in in_chunks(vector_N, TILE):
            kept_TF = dct(tiles_TE)[:, _low_frequencies()]
            all_scales_T[rows] = clamp_scales(kept_TF.abs().amax(1))
            inverse_T = reciprocals(all_scales_T[rows])
            all_halves_TF[rows] = kept_TF.mul_(inverse_T[:, None]).clamp_(-1, 1)
        return encoded.numpy().data

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """The inverse transform, with zeros for the high frequencies.

        Raises:
            MalformedMessage: a wrong length, a scale out of range, or numbers that are not finite.
        """
        encoded = as_tensor(buffer, self.num_bytes(num_elements), f"{num_elements} elements of {self.name}")
        scales_T, halves_TF = self._split(encoded, num_elements)
        check_scales(scales_T, self.name)
        check_finite(halves_TF, f"a vector in {self.name}")
        vector_TE = torch.empty(len(scales_T), TILE)
        for rows in slices(len(scales_T), CHUNK_ELEMENTS // TILE):
            coefficients_TE = torch.zeros(rows.stop - rows.start, TILE)
            coefficients_TE[:, _low_frequencies()] = halves_TF[rows].float() * scales_T[rows, None]
            vector_TE[rows] = inverse_dct(coefficients_TE)
        return vector_TE.view(-1)[:num_elements]

    def num_bytes(self, num_elements: int) -> int:
        """Exact size: whole tiles."""
        return -(-num_elements // TILE) * (4 + 2 * len(_low_frequencies()))

    def _split(self, encoded: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the scales, float32 (T,), and of the halves, float16 (T, F)."""
        num_tiles = -(-num_elements // TILE)
        scales_T = encoded[: 4 * num_tiles].view(torch.float32)
        return scales_T, encoded[4 * num_tiles :].view(torch.float16).view(num_tiles, len(_low_frequencies()))


def _exact_matrix() -> torch.Tensor:
    """The orthonormal DCT-II of 64 numbers in float64. Row k is the cosine of frequency k."""
    frequencies = torch.arange(SIDE, dtype=torch.float64)[:, None]
    positions = torch.arange(SIDE, dtype=torch.float64)[None, :]
    matrix = torch.cos(math.pi / (2 * SIDE) * (2 * positions + 1) * frequencies) * math.sqrt(2 / SIDE)
    matrix[0] /= math.sqrt(2)
    return matrix


@functools.cache
def _matrix() -> torch.Tensor:
    """The DCT-II in float32."""
    return _exact_matrix().float()


@functools.cache
def _whole_factors() -> torch.Tensor:
    """The DCT-II as whole numbers. None is near a half before rounding, so a cosine's last bit makes no difference."""
    return (_exact_matrix() * 2.0**FACTOR_BITS).round()


@functools.cache
def _low_frequencies() -> torch.Tensor:
    """Places of the lower half of the frequencies in a tile."""
    places = sorted(range(TILE), key=lambda place: (place // SIDE + place % SIDE, place // SIDE))
    return torch.tensor(places[: TILE // 2])
