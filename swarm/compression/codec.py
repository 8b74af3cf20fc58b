"""Codecs: how a vector of float32 becomes bytes for averaging, and back.

The interface, and the choice that a run's configuration makes. Used by averaging/. A codec is stateless and treats
one part of a vector at a time. Decoders trust nobody: wrong lengths and non-finite numbers are refused, and they
take memory in proportion to the vector they are told to expect. docs/protocol.md has every layout byte by byte.

Shapes: N elements of the part.
"""

from typing import Protocol

import torch

from swarm.compression.quantize import Cast, Int4, Int8
from swarm.config import AveragingConfig

Buffer = bytes | bytearray | memoryview


class Codec(Protocol):
    """One way to encode a float32 vector."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    @property
    def tile(self) -> int:
        """Parts of a vector are best cut at multiples of so many elements."""
        ...

    @property
    def needs_feedback(self) -> bool:
        """Whether it drops so much that the residual has to be fed back."""
        ...

    @property
    def is_sparse(self) -> bool:
        """Whether it keeps only some of the elements, so that a sum of several takes more bytes than each."""
        ...

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        """Encode a finite float32 CPU vector. The bytes may share the vector's memory."""
        ...

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """Decode to float32, shape (N,). The result may share the buffer's memory.

        Raises:
            MalformedMessage: wrong length, impossible contents, or numbers that are not finite.
        """
        ...

    def num_bytes(self, num_elements: int) -> int:
        """Exact size of `num_elements` encoded elements; it depends on nothing else."""
        ...
