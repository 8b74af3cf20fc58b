"""Dropout that can be computed again, with random masks that are the same on every device.

A microbatch may be computed again by another peer, on another device, and the numbers of torch's generators depend on
the device. So a mask is a hash of a key and of each element's place, computed with integers of 32 bits, whose overflow
is the same everywhere. Nothing is kept.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
"""The multipliers of lowbias32, as signed numbers. Of hashes with two multiplications it had the least bias in Chris
Wellons' search (hash-prospector)."""


@dataclass(frozen=True, kw_only=True)
class DropoutKey:
    """Names the dropout of one microbatch. Together with the place in the model it determines every mask."""

    seed: int
    microbatch: int


class Dropout(nn.Module):
    """Zeroes each element with `probability` and scales the rest to keep the mean; without a key, it does nothing.

    The mask follows from the key, the site's name and an element's place, whatever the device. Streams of several
    shards [N, B, T, D] have one mask, so that their sum has it too.
    """

    def __init__(self, probability: float, site: str) -> None:
        """`site` says where it is in the model."""
        super().__init__()
        self.probability, self.site = probability, site

    def forward(self, hidden_BTD: Tensor, key: DropoutKey | None) -> Tensor:
        """Drop elements of hidden_BTD, or of streams_NBTD."""
        # The site is read last, because compiled code that depends on it is valid only for a single layer.
        if key is None or self.probability == 0.0:
            return hidden_BTD
        shape, device = hidden_BTD.shape[-3:], hidden_BTD.device
        dropped_BTD = random_mask(shape, self.probability, device, key.seed, key.microbatch, self.site)
        return hidden_BTD.masked_fill(dropped_BTD, 0.0) * (1.0 / (1.0 - self.probability))


def key_digest(*key: int | str) -> bytes:
    """32 bytes that follow from `key` alone, in every process and Python version."""
    return hashlib.sha256("/".join(str(part) for part in key).encode()).digest()


def random_mask(shape: Sequence[int], probability: float, device: torch.device, *key: int | str) -> Tensor:
    """A bool mask of `shape`, in which each element is true with `probability`, rounded to the nearest 65,536th.

    The mask follows from the key, each element's number in C order, and the probability. With a larger probability the
    same elements are true, and more.
    """
    num_elements = math.prod(shape)
    # Each word of 32 bits decides two elements, with 16 bits each.
    words_N = torch.arange(-(-num_elements // 2), dtype=torch.int32, device=device)
    shifted_N = torch.empty_like(words_N)
    digest = key_digest(*key)
    first, second = (int.from_bytes(digest[start : start + 4], "little", signed=True) for start in (0, 4))
    words_N.bitwise_xor_(first)
    _mix(words_N, shifted_N, 16).mul_(_MULTIPLIERS[0]).bitwise_xor_(second)
    _mix(words_N, shifted_N, 15).mul_(_MULTIPLIERS[1])
    _mix(words_N, shifted_N, 16)
    # The 16 bits are compared as signed numbers, of which half are negative.
    threshold = round(probability * 65536) - 32768
    if threshold == 32768:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    return (words_N.view(torch.int16)[:num_elements] < threshold).view(*shape)


def _mix(words_N: Tensor, shifted_N: Tensor, num_bits: int) -> Tensor:
    """Compute words ^= words >> num_bits, as if the words were unsigned."""
    torch.bitwise_right_shift(words_N, num_bits, out=shifted_N)
    # Shifting a signed number fills the upper bits with its sign, so these are cleared.
    shifted_N.bitwise_and_((1 << (32 - num_bits)) - 1)
    return words_N.bitwise_xor_(shifted_N)
