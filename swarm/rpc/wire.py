"""Tensors on the wire: what a receiver expects, and puts together again.

A tensor travels as its own bytes, cut into chunks, so that no message is large; the receiver knows which shapes it
wants and allocates nothing else. Never converts between element types, and never encodes: that is work for the compute
thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from swarm.compression.quantize import Int8, ScaledHalf
from swarm.errors import MalformedMessage
from swarm.rpc.v1.tensor_pb2 import TensorHeader

CHUNK_BYTES = 1 << 20
"""Most bytes of a tensor in one chunk. A message is sent once it has this many, so it has less than twice as many."""

LARGEST_ACTIVATION = 65504.0
"""Largest magnitude of an activation or its gradient: float16's largest number, whatever the element type. Beyond it,
training has diverged or a peer wants to make it diverge: products of such numbers overflow float32."""

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int32": torch.int32,
}
"""Element types by their names on the wire."""

_INT8, _FP16 = Int8(), ScaledHalf()
ENCODINGS: Mapping[str, torch.dtype] = {**DTYPES, _INT8.name: torch.uint8}
"""The encodings that may travel between stages: element types, and a codec's output as bytes."""
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in ENCODINGS.items()}
"""The encodings by their element types."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a receiver expects under one name."""

    shape: tuple[int, ...]
    encoding: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor on the wire."""
        num_bytes = ENCODINGS[self.encoding].itemsize
        for extent in self.shape:
            num_bytes *= extent
        return num_bytes


Piece = tuple[TensorHeader | None, memoryview]
"""A piece of a tensor, with the header if it is the first one."""


NewBytes = Callable[[int], torch.Tensor]
"""Makes memory for this many bytes, whatever they are: a tensor of uint8 on the CPU."""


def new_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class TensorReader:
    """Assembles the expected tensors from the chunks of one stream."""

    def __init__(self, expected: Mapping[str, TensorSpec], memory: NewBytes = new_bytes) -> None:
        """
        Args:
            memory: makes the memory of each tensor.
        """
        self._missing = dict(expected)
        self._memory = memory
        self._bytes = new_bytes(0)
        self._buffer = memoryview(b"")
        self._current: TensorSpec | None = None
        self._name = ""
        self._filled = 0
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        return not self._missing and self._current is None

    def clear(self) -> None:
        """Let go of all bytes: the traceback of an error that `feed` raised may keep this reader alive for long.

        Callers that have taken `tensors` keep them.
        """
        self._bytes, self._buffer, self.tensors = new_bytes(0), memoryview(b""), {}

    def feed(self, piece: Piece) -> None:
        """Take the next piece, which is copied.

        Raises:
            MalformedMessage: the piece is empty, or has an unexpected or repeated name, or another shape, encoding or
                size than expected.
        """
        header, data = piece
        if header is not None:
            self._begin(header)
        if self._current is None:
            raise MalformedMessage("a tensor chunk came before its header")
        if self._buffer and not data:
            raise MalformedMessage(f"an empty chunk of tensor {self._name!r}")
        end = self._filled + len(data)
        if end > len(self._buffer):
            raise MalformedMessage(f"tensor {self._name!r} is longer than its header says")
        self._buffer[self._filled : end] = data
        self._filled = end
        if end == len(self._buffer):
            self._finish(self._current)

    def _begin(self, header: TensorHeader) -> None:
        if self._current is not None:
            raise MalformedMessage(f"tensor {header.name!r} begins before {self._name!r} is complete")
        spec = self._missing.pop(header.name, None)
        if spec is None:
            raise MalformedMessage(f"tensor {header.name[:64]!r} is not expected here")
        if tuple(header.shape) != spec.shape or header.encoding != spec.encoding:
            raise MalformedMessage(
                f"tensor {header.name!r} is {header.encoding[:16]!r} {list(header.shape)[:8]}, "
                f"expected {spec.encoding!r} {list(spec.shape)}"
            )
        if header.num_bytes != spec.num_bytes:
            raise MalformedMessage(f"tensor {header.name!r} has {header.num_bytes} bytes, expected {spec.num_bytes}")
        self._name, self._current, self._filled = header.name, spec, 0
        # Not cleared: a tensor is given out once all of its bytes have come.
        self._bytes = self._memory(spec.num_bytes)
        self._buffer = self._bytes.numpy().data

    def _finish(self, spec: TensorSpec) -> None:
        self.tensors[self._name] = self._bytes.view(ENCODINGS[spec.encoding]).reshape(spec.shape)
        self._current = None


def require_in_range(name: str, tensor: torch.Tensor) -> None:
    """Raise MalformedMessage for NaN, infinity, numbers beyond LARGEST_ACTIVATION, or bytes that no codec made."""
    if tensor.numel() == 0:
        return
    if tensor.dtype is torch.uint8:
        high = _INT8.largest(tensor)
        low = -high
    else:
        scale = 1.0
        if tensor.dtype is torch.float16:
            scale, tensor = _FP16.scale(tensor), tensor[1:]
        # aminmax passes NaN on, and NaN fails every comparison.
        low, high = (scale * float(extreme) for extreme in torch.aminmax(tensor))
    if not (low >= -LARGEST_ACTIVATION and high <= LARGEST_ACTIVATION):
        raise MalformedMessage(f"tensor {name!r} holds NaN, infinity, or numbers beyond {LARGEST_ACTIVATION:.0f}")
