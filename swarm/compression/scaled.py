"""float16 with a scale: how hidden states and their gradients travel with `wire.dtype = "fp16"`.

Called by stage/boundary, which encodes and decodes, and by rpc/wire, which checks what arrived. float16 alone has the
range of activations but not that of gradients: with a loss that is a mean over many tokens, most gradients are so small
that float16 cannot tell them from zero. So a tensor is multiplied by the power of two that brings its largest magnitude
near float16's own, and the exponent travels with it. This is loss scaling (arXiv 1710.03740, section 3.2) for each
tensor, with no scale to guess. Multiplying by a power of two rounds nothing. The power follows from the numbers alone,
so the same numbers give the same bytes.

The encoder works on the device that the numbers are on, and does not wait for that device. A decoder reads the exponent
on the CPU.

Shapes: N numbers of a tensor.
"""

import math

import torch

from swarm.errors import MalformedMessage

_FLOAT32_BIAS = 127
_FLOAT32_MANTISSA_BITS = 23
_TOP = 14
"""The largest magnitude becomes at least 2^14 and less than 2^15. Even rounded, it is half of float16's largest."""
_ZERO = _FLOAT32_BIAS + _TOP
"""The exponent, with float32's bias, for which numbers travel unscaled."""
_LEAST, _MOST = _TOP + 1, 254
"""Between these exponents, the scale and its reciprocal are normal float32 numbers."""


class ScaledHalf:
    """One float16 that holds an exponent, and then the tensor's numbers times 2^(141 - exponent).

    The exponent is that of the largest magnitude, with float32's bias: a whole number from 15 to 254. 2^(exponent -
    127) is at most that magnitude, and more than half of it.
    """

    name = "fp16"

    def num_elements(self, num_numbers: int) -> int:
        """How many float16 numbers encode `num_numbers`."""
        return 1 + num_numbers

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Encode a tensor of at least one floating-point number as float16 (1 + N,), on the same device.

        Numbers that are not finite stay so, and every receiver refuses them.
        """
        numbers_N = tensor.detach().float().reshape(-1)
        low, high = torch.aminmax(numbers_N)
        # The exponent is read from the bits, because logarithms round differently on different devices.
        largest_bits = torch.maximum(-low, high).view(torch.int32)
        exponent = (largest_bits >> _FLOAT32_MANTISSA_BITS).clamp(_LEAST, _MOST)
        scale = ((_FLOAT32_BIAS + _ZERO - exponent) << _FLOAT32_MANTISSA_BITS).view(torch.float32)
        return torch.cat((exponent.half().reshape(1), (numbers_N * scale).half()))

    def scale(self, encoded: torch.Tensor) -> float:
        """The factor for the numbers `encoded[1:]`. `encoded` is on the CPU and came from `encode`.

        Raises:
            MalformedMessage: an exponent that is not a whole number, or out of range.
        """
        exponent = float(encoded[0])
        # NaN fails the comparison.
        if not (_LEAST <= exponent <= _MOST and exponent.is_integer()):
            raise MalformedMessage(f"fp16 begins with {exponent}, which is not the exponent of a scale")
        return math.ldexp(1.0, int(exponent) - _ZERO)
