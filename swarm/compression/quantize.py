"""Dense codecs, which keep every element: casts to a smaller floating-point type, and blockwise integers.

Decoding takes one product for each element, which is rounded in the same way on every processor.

Shapes: N elements of the part, B blocks, E elements of a block.
"""

from abc import ABC, abstractmethod

import torch

from swarm.compression.buffers import (
    CHUNK_ELEMENTS,
    Buffer,
    as_tensor,
    check_finite,
    check_scales,
    clamp_scales,
    in_chunks,
    reciprocals,
    slices,
)
from swarm.errors import MalformedMessage


class Cast:
    """Writes the elements in a floating-point type, little-endian, one after the other."""

    tile = 1
    needs_feedback = False
    is_sparse = False

    def __init__(self, name: str, dtype: torch.dtype, sketch_tolerance: float) -> None:
        self.name, self.sketch_tolerance = name, sketch_tolerance
        self._dtype = dtype

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        """Cast. Numbers beyond the type's range become its largest. For float32 the bytes are the vector's memory."""
        encoded_N = vector_N.detach().contiguous()
        if self._dtype is not torch.float32:
            encoded_N = torch.empty(vector_N.numel(), dtype=self._dtype)
            # Without the clamp larger numbers would become infinite, and every receiver would refuse them.
            limit = torch.finfo(self._dtype).max
            for piece in slices(vector_N.numel(), CHUNK_ELEMENTS):
                encoded_N[piece] = vector_N.detach()[piece].clamp(-limit, limit)
        return encoded_N.view(torch.uint8).numpy().data

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """Cast back. Raises MalformedMessage for a wrong length, NaN or infinity."""
        encoded = as_tensor(buffer, self.num_bytes(num_elements), f"{num_elements} elements of {self.name}")
        return check_finite(encoded.view(self._dtype).float(), f"a vector in {self.name}")

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self._dtype.itemsize


class Blockwise(ABC):
    """Writes codes that are relative to a scale for each block: first the scales of all blocks, then all codes.

    A block's largest magnitude gets the largest code. The last block is filled up with zeros.
    """

    name: str
    tile: int
    needs_feedback: bool
    is_sparse = False
    sketch_tolerance = 0.0
    _scale_dtype = torch.bfloat16
    """It has the range of float32. Its coarse steps cost next to no accuracy, because codes are relative to the rounded
    scale."""
    _limit: int
    """Magnitude of the largest code."""
    _code_bytes: int
    """Bytes that the codes of a block take."""

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        """Quantise each block relative to its scale, which is first rounded to the type in which it travels."""
        encoded = torch.empty(self.num_bytes(vector_N.numel()), dtype=torch.uint8)
        all_scales_B, all_codes = self._split(encoded, vector_N.numel())
        temporary = torch.empty(CHUNK_ELEMENTS)
        for rows, blocks_BE in in_chunks(vector_N, self.tile):
            kept_BE = self._choose(blocks_BE)
            scaled_BE = temporary[: kept_BE.numel()].view(kept_BE.shape)
            all_scales_B[rows] = clamp_scales(torch.abs(kept_BE, out=scaled_BE).amax(1) / self._limit)
            inverse_B = reciprocals(all_scales_B[rows].float())
            torch.mul(kept_BE, inverse_B[:, None], out=scaled_BE)
            self._pack(scaled_BE.clamp_(-self._limit, self._limit), all_codes[rows])
        return encoded.numpy().data

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """Multiply the codes by their scales. Raises MalformedMessage for a wrong length, a scale out of range, or a
        code that no encoder writes."""
        encoded = as_tensor(buffer, self.num_bytes(num_elements), f"{num_elements} elements of {self.name}")
        scales_B, codes = self._split(encoded, num_elements)
        scales_B1 = check_scales(scales_B, self.name)[:, None]
        vector_BE = torch.empty(len(codes), self.tile)
        for rows in slices(len(codes), CHUNK_ELEMENTS // self.tile):
            self._unpack(codes[rows], scales_B1[rows], vector_BE[rows])
        return vector_BE.view(-1)[:num_elements]

    def num_bytes(self, num_elements: int) -> int:
        return -(-num_elements // self.tile) * (self._scale_dtype.itemsize + self._code_bytes)

    def _split(self, encoded: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the scales (B,), and of the codes, uint8 (B, bytes of a block)."""
        num_blocks = -(-num_elements // self.tile)
        scales_bytes = num_blocks * self._scale_dtype.itemsize
        scales_B = encoded[:scales_bytes].view(self._scale_dtype)
        return scales_B, encoded[scales_bytes:].view(num_blocks, self._code_bytes)

    def _choose(self, blocks_BE: torch.Tensor) -> torch.Tensor:
        return blocks_BE

    @abstractmethod
    def _pack(self, scaled_BE: torch.Tensor, target: torch.Tensor) -> None:
        """Write numbers between the limits as codes. May overwrite the numbers."""

    @abstractmethod
    def _unpack(self, codes: torch.Tensor, scales_B1: torch.Tensor, target_BE: torch.Tensor) -> None:
        """Multiply codes by scales. Raises MalformedMessage for a code that no encoder writes."""


class Int8(Blockwise):
    """Codes from -127 to 127, the nearest whole numbers (of two, the even one), a byte each."""

    name = "int8"
    tile = 128
    needs_feedback = False
    sketch_tolerance = 0.1
    _limit = 127
    _code_bytes = 128

    def largest(self, encoded: torch.Tensor) -> float:
        """An upper bound on the magnitudes that whole blocks (uint8) decode to, without decoding them. Raises
        MalformedMessage for a scale out of range, or a code below the range."""
        scales_B, codes = self._split(encoded, encoded.numel() // (2 + self.tile) * self.tile)
        self._check(codes.view(torch.int8))
        return self._limit * float(check_scales(scales_B, self.name).amax())

    def _check(self, codes_BE: torch.Tensor) -> None:
        if int(codes_BE.amin()) < -127:
            raise MalformedMessage("int8 holds the code -128")

    def _pack(self, scaled_BE: torch.Tensor, target: torch.Tensor) -> None:
        target.view(torch.int8).copy_(scaled_BE.round_())

    def _unpack(self, codes: torch.Tensor, scales_B1: torch.Tensor, target_BE: torch.Tensor) -> None:
        codes_BE = codes.view(torch.int8)
        self._check(codes_BE)
        torch.mul(codes_BE, scales_B1, out=target_BE)


class Int4(Blockwise):
    """Codes from -7 to 7, the nearest whole numbers as in int8. 8 is added to each code, and a byte holds two.

    A byte's low bits belong to the block's first half, and its high bits to the second, so that packing moves whole
    rows.
    """

    name = "int4"
    tile = 64
    needs_feedback = True
    _limit = 7
    _code_bytes = 32

    def _pack(self, scaled_BE: torch.Tensor, target: torch.Tensor) -> None:
        low, high = scaled_BE.round_().chunk(2, 1)
        target.copy_(low.add(high, alpha=16).add_(8 + 8 * 16))

    def _unpack(self, codes: torch.Tensor, scales_B1: torch.Tensor, target_BE: torch.Tensor) -> None:
        halves = codes & 15, codes >> 4
        for half, target in zip(halves, target_BE.chunk(2, 1), strict=True):
            if int(half.amin()) == 0:
                raise MalformedMessage("int4 holds the code -8")
            torch.mul(half.view(torch.int8).sub_(8), scales_B1, out=target)
