"""The encodings in which hidden states and their gradients travel between stages: one class for each, and their table.

To add another, write a class, put it into the table, and name it in config/stages.py (WireDtype). A stage computes what
`prepared` does on its device, and what `converts` gives on the CPU. The same numbers give the same bytes.

Shapes: N numbers of a tensor.
"""

import math
from collections.abc import Callable

import torch

from swarm.compression.quantize import Int8
from swarm.errors import MalformedMessage

_FLOAT32_BIAS = 127
_FLOAT32_MANTISSA_BITS = 23
_TOP = 14
"""The largest magnitude becomes at least 2^14 and less than 2^15. Even rounded, it is half of float16's largest."""
_ZERO = _FLOAT32_BIAS + _TOP
"""The exponent, with float32's bias, for which numbers travel unscaled."""
_LEAST, _MOST = _TOP + 1, 254
"""Between these exponents, the scale and its reciprocal are normal float32 numbers."""

Change = Callable[[torch.Tensor], torch.Tensor]


class Encoding:
    """The numbers in a floating-point type. Encodings of another kind override what they do otherwise."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        """`dtype` is the type of the tensor that travels."""
        self.name, self.dtype = name, dtype

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """That of the tensor that travels for one of these sizes."""
        return sizes

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first part of encoding, on the tensor's device, which it does not wait for. A tensor that has the type
        already is not copied."""
        return tensor.detach().to(self.dtype)

    @property
    def converts(self) -> Change | None:
        """The second part, on the CPU, into memory of its own; None if the first part is all."""
        return None

    def decode(self, wire: torch.Tensor, sizes: tuple[int, ...], upload: Change) -> torch.Tensor:
        """Decode what is on the CPU, to float32 where `upload` brings it. Raises MalformedMessage if it is invalid."""
        return upload(wire).float()

    def largest(self, wire: torch.Tensor) -> float:
        """An upper bound on the magnitudes in an encoded tensor on the CPU, which is not empty; NaN if one is NaN.
        Raises MalformedMessage if it is not valid."""
        # aminmax passes NaN on, to both of its results.
        low, high = torch.aminmax(wire)
        return max(-float(low), float(high))

    def norm(self, wire: torch.Tensor) -> float:
        """The norm of the numbers in an encoded tensor on the CPU. Raises MalformedMessage if it is not valid."""
        return float(torch.linalg.vector_norm(wire, dtype=torch.float32))


class ScaledHalf(Encoding):
    """One float16 that holds an exponent, and then the tensor's numbers times 2^(141 - exponent).

    float16 alone has the range of activations but not that of gradients: with a loss that is a mean over many tokens,
    most gradients are so small that float16 cannot tell them from zero. So a tensor is multiplied by the power of two
    that brings its largest magnitude near float16's own, which rounds nothing, and the exponent travels with it. This
    is loss scaling (arXiv 1710.03740, section 3.2) for each tensor, with no scale to guess.

    The exponent is that of the largest magnitude, with float32's bias: a whole number from 15 to 254. 2^(exponent -
    127) is at most that magnitude, and more than half of it.
    """

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (1 + math.prod(sizes),)

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers that are not finite stay so, and every receiver refuses them."""
        numbers_N = tensor.detach().float().reshape(-1)
        low, high = torch.aminmax(numbers_N)
        # The exponent is read from the bits, because logarithms round differently on different devices.
        largest_bits = torch.maximum(-low, high).view(torch.int32)
        exponent = (largest_bits >> _FLOAT32_MANTISSA_BITS).clamp(_LEAST, _MOST)
        scale = ((_FLOAT32_BIAS + _ZERO - exponent) << _FLOAT32_MANTISSA_BITS).view(torch.float32)
        return torch.cat((exponent.half().reshape(1), (numbers_N * scale).half()))

    def decode(self, wire: torch.Tensor, sizes: tuple[int, ...], upload: Change) -> torch.Tensor:
        return upload(wire[1:]).float().mul_(self._scale(wire)).view(sizes)

    def largest(self, wire: torch.Tensor) -> float:
        return self._scale(wire) * super().largest(wire[1:])

    def norm(self, wire: torch.Tensor) -> float:
        return self._scale(wire) * super().norm(wire[1:])

    def _scale(self, wire: torch.Tensor) -> float:
        exponent = float(wire[0])
        # NaN fails the comparison.
        if not (_LEAST <= exponent <= _MOST and exponent.is_integer()):
            raise MalformedMessage(f"fp16 begins with {exponent}, which is not the exponent of a scale")
        return math.ldexp(1.0, int(exponent) - _ZERO)


class Bytes(Encoding):
    """What averaging's codec int8 makes of the numbers: blocks with a scale each."""

    _codec = Int8()

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (self._codec.num_bytes(math.prod(sizes)),)

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().float()

    @property
    def converts(self) -> Change:
        return lambda host: torch.frombuffer(self._codec.encode(host.reshape(-1)), dtype=torch.uint8)

    def decode(self, wire: torch.Tensor, sizes: tuple[int, ...], upload: Change) -> torch.Tensor:
        return upload(self._codec.decode(wire.numpy().data, math.prod(sizes)).view(sizes))

    def largest(self, wire: torch.Tensor) -> float:
        return self._codec.largest(wire)

    def norm(self, wire: torch.Tensor) -> float:
        # Blocks are filled up with zeros.
        num_elements = len(wire) // self._codec.num_bytes(self._codec.tile) * self._codec.tile
        return super().norm(self._codec.decode(wire.numpy().data, num_elements))


ENCODINGS = {
    each.name: each
    for each in (
        Encoding("fp32", torch.float32), Encoding("bf16", torch.bfloat16), ScaledHalf("fp16", torch.float16),
        Bytes("int8", torch.uint8),
    )
}  # fmt: skip
