"""The table of the encodings of activations is that of the configuration, and each has another type on the wire.

tests/stage/test_boundary.py sends tensors in all of them.
"""

from typing import get_args

from swarm.compression.activations import ENCODINGS
from swarm.config.stages import WireDtype


def test_every_encoding_of_the_configuration_is_there_and_known_by_its_type() -> None:
    assert list(ENCODINGS) == list(get_args(WireDtype))
    assert len({encoding.dtype for encoding in ENCODINGS.values()}) == len(ENCODINGS)
