"""The discrete cosine transform of tiles, and the codec that keeps its low frequencies.

sparsify.py uses the transform as well. It is the orthonormal DCT-II of a tile seen as 64 x 64, along both axes, as two
matrix products. Different processors add up a product's terms in different orders and round differently. That does not
matter in encoding, because each vector has one sender. But members must decode the same bytes to the same bits. So the
inverse multiplies whole numbers, small enough for float64 to hold every sum of their products exactly. Then nothing is
rounded, and the order makes no difference.

Shapes: T tiles, or B as blocks; E = 4096 elements of a tile, F = 2048 frequencies kept.
"""

import functools
import math

import torch

from swarm.compression.buffers import SIDE, TILE, check_finite
from swarm.compression.quantize import Blockwise

FACTOR_BITS = 25
"""The inverse's cosines (`_whole_factors`) are whole multiples of 2**-25, and less than 0.18."""
TERM_BITS = 23
"""The cosines are multiplied by whole multiples of 2**-23 times a power of two, which are less than twice that power.
So 64 products add up to less than 64 * 0.18 * 2**(25 + 24), which is below 2**53."""


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
    # The sign of a sum of zeros depends on their order. Adding 0 makes it positive.
    return (factors.T @ terms).mul_(unit_T11).add_(0.0).float().view(-1, TILE)


def _whole_terms(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each tile's numbers as whole multiples of a power of two, and these powers (T, 1, 1). Overwrites the tiles."""
    largest_T11 = tiles.abs().amax((1, 2), keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    # A positive float64 whose mantissa bits are cleared is a power of two.
    power_T11 = (largest_T11.view(torch.int64) >> 52 << 52).view(torch.float64)
    return tiles.mul_(2.0**TERM_BITS / power_T11).round_(), power_T11 * 2.0**-TERM_BITS


class DctLowpass(Blockwise):
    """Keeps the half of each tile's coefficients with the lowest frequencies.

    The coefficients are float16 numbers relative to the largest magnitude, which is a float32 scale. They are ordered
    by the sum of both frequencies, and then by the first one. The filter is that of torchrun-ddp.
    """

    name = "dct-lowpass"
    tile = TILE
    needs_feedback = True
    _scale_dtype = torch.float32
    _limit = 1
    _code_bytes = 2 * (TILE // 2)

    def _choose(self, blocks_BE: torch.Tensor) -> torch.Tensor:
        return dct(blocks_BE)[:, _low_frequencies()]

    def _pack(self, scaled_BE: torch.Tensor, target: torch.Tensor) -> None:
        target.view(torch.float16).copy_(scaled_BE)

    def _unpack(self, codes: torch.Tensor, scales_B1: torch.Tensor, target_BE: torch.Tensor) -> None:
        halves_BF = check_finite(codes.view(torch.float16), f"a vector in {self.name}")
        coefficients_BE = torch.zeros_like(target_BE)
        coefficients_BE[:, _low_frequencies()] = halves_BF.float() * scales_B1
        target_BE.copy_(inverse_dct(coefficients_BE))


def _exact_matrix() -> torch.Tensor:
    """The orthonormal DCT-II of 64 numbers in float64. Row k is the cosine of frequency k."""
    frequencies = torch.arange(SIDE, dtype=torch.float64)[:, None]
    positions = torch.arange(SIDE, dtype=torch.float64)[None, :]
    matrix = torch.cos(math.pi / (2 * SIDE) * (2 * positions + 1) * frequencies) * math.sqrt(2 / SIDE)
    matrix[0] /= math.sqrt(2)
    return matrix


@functools.cache
def _matrix() -> torch.Tensor:
    return _exact_matrix().float()


@functools.cache
def _whole_factors() -> torch.Tensor:
    """The DCT-II as whole numbers. No number is near a half before rounding, so a cosine's last bit does not matter."""
    return (_exact_matrix() * 2.0**FACTOR_BITS).round()


@functools.cache
def _low_frequencies() -> torch.Tensor:
    places = sorted(range(TILE), key=lambda place: (place // SIDE + place % SIDE, place // SIDE))
    return torch.tensor(places[: TILE // 2])
