"""The table of the encodings of activations is that of the configuration. tests/stage/test_boundary.py sends tensors in
all of them."""

from typing import get_args

from swarm.compression.activations import ENCODINGS
from swarm.config.stages import WireDtype


def test_every_encoding_of_the_configuration_is_there() -> None:
    assert list(ENCODINGS) == [encoding.name for encoding in ENCODINGS.values()] == list(get_args(WireDtype))
