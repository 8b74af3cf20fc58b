"""Codecs: how a vector of float32 becomes bytes for averaging, and back.

Used by averaging/allreduce. A codec is stateless and treats one part of a vector at a time; the name in the
run's configuration picks it. Decoders trust nobody: wrong lengths and non-finite numbers are refused.

Shapes: N elements of the part.
"""

from typing import Protocol

import torch

from swarm.errors import MalformedMessage

Buffer = bytes | bytearray | memoryview


class Codec(Protocol):
    """One way to encode a float32 vector."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        """Encode a finite float32 CPU vector. The bytes may share the vector's memory."""
        ...

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """Decode to float32, shape (N,). The result may share the buffer's memory.

        Raises:
            MalformedMessage: wrong length, or numbers that are not finite.
        """
        ...

    def num_bytes(self, num_elements: int) -> int:
        """Size of `num_elements` encoded elements."""
        ...


class _Cast:
    """Elements of a floating-point type, little-endian, one after the other."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        if self._dtype is not torch.float32:
            # Larger numbers would become infinite and be refused by every receiver.
            limit = torch.finfo(self._dtype).max
            vector_N = vector_N.clamp(-limit, limit).to(self._dtype)
        return vector_N.detach().contiguous().view(torch.uint8).numpy().data

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        if len(buffer) != self.num_bytes(num_elements):
            raise MalformedMessage(
                f"{num_elements} elements of {self.name} take {self.num_bytes(num_elements)} bytes, not {len(buffer)}"
            )
        if num_elements == 0:
            return torch.empty(0)
        # torch wants writable memory; bytes are not.
        writable = bytearray(buffer) if isinstance(buffer, bytes) else buffer
        vector_N = torch.frombuffer(writable, dtype=self._dtype).float()
        if not bool(torch.isfinite(vector_N).all()):
            raise MalformedMessage(f"a vector in {self.name} holds NaN or infinity")
        return vector_N

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self._dtype.itemsize


_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (_Cast("fp32", torch.float32), _Cast("fp16", torch.float16))
}


def codec_names() -> list[str]:
    """The codecs there are."""
    return sorted(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of that name. Raises ValueError naming the known ones."""
    if name not in _CODECS:
        raise ValueError(f"unknown codec {name!r}; the codecs are {', '.join(codec_names())}")
    return _CODECS[name]
