import math
import struct

import numpy as np
import pytest
import torch

from swarm.compression.dct import DctLowpass, dct, inverse_dct
from swarm.errors import MalformedMessage
from tests.compression.all_codecs import make_vector


def test_the_transform_is_the_orthonormal_dct_ii_along_both_axes() -> None:
    tiles_TE = make_vector(2 * 4096).view(2, 4096)
    positions, frequencies = np.arange(64), np.arange(64)[:, None]
    matrix = np.cos(np.pi * (2 * positions + 1) * frequencies / 128) * np.where(
        frequencies == 0, 1 / 8, math.sqrt(1 / 32)
    )
    expected = np.einsum("ah,thw,bw->tab", matrix, tiles_TE.view(2, 64, 64).double().numpy(), matrix)
    np.testing.assert_allclose(dct(tiles_TE).view(2, 64, 64).numpy(), expected, atol=2e-5)


def test_the_layout_is_the_documented_one() -> None:
    vector_N = make_vector(4096 + 100)
    encoded = bytes(DctLowpass().encode(vector_N))
    scales = struct.unpack("<2f", encoded[:8])
    halves = np.frombuffer(encoded, dtype="<f2", offset=8).astype(np.float64).reshape(2, 2048)
    order = sorted((row + column, row, column) for row in range(64) for column in range(64))[:2048]
    expected = np.zeros((2, 64, 64))
    for tile, scale in enumerate(scales):
        for half, (_, row, column) in zip(halves[tile], order, strict=True):
            expected[tile, row, column] = half * scale
    expected_TE = inverse_dct(torch.from_numpy(expected).float().view(2, 4096))
    np.testing.assert_allclose(DctLowpass().decode(encoded, 4196), expected_TE.view(-1)[:4196], atol=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_numbers_that_are_not_finite_are_refused(wrong: float) -> None:
    codec = DctLowpass()
    encoded = bytes(codec.encode(make_vector(4096)))
    with pytest.raises(MalformedMessage, match="a scale of dct-lowpass is not"):
        codec.decode(struct.pack("<f", wrong) + encoded[4:], 4096)
    if wrong != -1.0:
        with pytest.raises(MalformedMessage, match="NaN or infinity"):
            codec.decode(encoded[:100] + struct.pack("<e", wrong) + encoded[102:], 4096)
