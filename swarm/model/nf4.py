"""Frozen matrices in 4 bits: NF4 with double quantisation (QLoRA, arXiv 2305.14314).

A block of 64 numbers has its largest magnitude as scale, and of each number the nearest of 16 values, which are
quantiles of the normal distribution over it. The scales are coded once more: their mean is subtracted, and blocks of
256 of them are held in 8 bits. Together that is 0.52 bytes a number. Codes are chosen with the scales as they were, on
the CPU, by operations that every machine rounds in the same way.

Shapes: E rows of a matrix, D columns.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from swarm.training.blockwise import BLOCK as SCALES_BLOCK
from swarm.training.blockwise import SIGNED

BLOCK = 64
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""As in the paper's appendix E."""
_CHUNK_BLOCKS = {"cpu": 1 << 12}
"""How many blocks are decoded at a time, so that what is needed in between stays in cache; on a GPU all of a matrix."""
_ENCODED_BLOCKS = 1 << 14


def num_bytes(num_elements: int) -> int:
    """The bytes of a matrix in this form."""
    num_blocks = -(-num_elements // BLOCK)
    num_rows = -(-num_blocks // SCALES_BLOCK)
    return num_blocks * BLOCK // 2 + num_rows * (SCALES_BLOCK + 4) + 4


class Nf4Matrix(nn.Module):
    """A matrix that is not trained. It takes a weight's place in a layer, and `dense` makes it anew for each use."""

    requires_grad = False
    codes: Tensor
    scale_codes: Tensor
    scale_scales: Tensor
    mean: Tensor
    pairs: Tensor
    scale_values: Tensor

    def __init__(self, weight_ED: Tensor) -> None:
        super().__init__()
        self.shape = weight_ED.shape
        num_blocks = -(-weight_ED.numel() // BLOCK)
        codes, scales = torch.empty(num_blocks, BLOCK // 2, dtype=torch.uint8), torch.empty(num_blocks)
        flat, size = weight_ED.detach().reshape(-1), _ENCODED_BLOCKS * BLOCK
        for number, start in enumerate(range(0, flat.numel(), size)):
            blocks = slice(number * _ENCODED_BLOCKS, (number + 1) * _ENCODED_BLOCKS)
            codes[blocks], scales[blocks] = _encoded(flat[start : start + size].float())
        mean = math.fsum(scales.tolist()) / num_blocks
        rows = torch.zeros(-(-num_blocks // SCALES_BLOCK), SCALES_BLOCK)
        rows.view(-1)[:num_blocks] = scales - mean
        scale_codes, scale_scales = torch.empty(rows.shape, dtype=torch.uint8), torch.empty(len(rows), 1)
        SIGNED.encode(rows.numpy(), scale_codes.numpy(), scale_scales.numpy())
        # They follow from the base model's weights, so they are in no state that is saved.
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale_codes", scale_codes, persistent=False)
        self.register_buffer("scale_scales", scale_scales, persistent=False)
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        # Not looked up in each use: compiled code would make them anew on the CPU, and copy them to a GPU.
        pairs, scale_values = _tables()
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("scale_values", scale_values, persistent=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [E, D] in a type. Never waits for the device."""
        num_elements, num_blocks, device = self.shape.numel(), len(self.codes), self.codes.device
        scales = self.scale_values.index_select(0, self.scale_codes.view(-1).int()).view_as(self.scale_codes)
        scales = scales.mul_(self.scale_scales).view(-1)[:num_blocks].add_(self.mean)
        size = _CHUNK_BLOCKS.get(device.type, num_blocks)
        dense = torch.empty(num_blocks, BLOCK, dtype=dtype, device=device)
        for start in range(0, num_blocks, size):
            blocks = slice(start, start + size)
            values = self.pairs.index_select(0, self.codes[blocks].view(-1).int()).view(-1, BLOCK)
            dense[blocks] = values.mul_(scales[blocks, None])
        return dense.view(-1)[:num_elements].view(self.shape)


def _encoded(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of blocks, two in a byte, and their scales."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    values = torch.tensor(VALUES, dtype=torch.float64)
    middles = ((values[:-1] + values[1:]) / 2).float()
    codes = torch.bucketize(padded / scales.where(scales > 0, 1.0)[:, None], middles, out_int32=True)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), scales


@lru_cache
def _tables() -> tuple[Tensor, Tensor]:
    """The two values of each byte [256, 2], and that of each scale's byte [256]: a few KiB, once for all matrices."""
    values = torch.tensor(VALUES)
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1), torch.from_numpy(SIGNED.values)
