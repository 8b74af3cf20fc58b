"""The table of the encodings of activations is that of the configuration. tests/stage/test_boundary.py sends tensors in
all of them."""

from typing import get_args

import pytest
import torch

from swarm.compression.activations import ENCODINGS
from swarm.config.stages import WireDtype


def test_every_encoding_of_the_configuration_is_there() -> None:
    assert list(ENCODINGS) == [encoding.name for encoding in ENCODINGS.values()] == list(get_args(WireDtype))


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_norm_is_that_of_the_numbers(name: str) -> None:
    numbers, encoding = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)) * 1e-6, ENCODINGS[name]
    prepared = encoding.prepared(numbers)
    wire = encoding.converts(prepared) if encoding.converts else prepared
    decoded = encoding.decode(wire, (3, 100), lambda each: each)
    assert encoding.norm(wire) == pytest.approx(float(decoded.norm()), rel=1e-5)
