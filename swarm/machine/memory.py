"""Memory of large tensors that come again in each round, at the same sizes.

Used by stage/weights and averaging. What is given back to the C library may go on to the system, whatever the library
is told: protobuf has it return all that is free whenever 10,000 pieces of messages were freed (`upb_trim_allocfunc` in
its python/protobuf.c). Then every page is cleared anew, for which 14 µs were measured on a virtual machine.
And what lies about the holes that one round leaves keeps the next one's vectors out.
"""

import os
import weakref
from collections.abc import Mapping

import numpy as np
import torch

_ALIGNMENT = 64
"""Bytes: a vector begins with a cache line, as torch's own do."""


class Recycler:
    """Float32 vectors on the CPU, made of the memory of those that nobody uses any more.

    From any thread. The memory is kept for as long as this object; not at all where the user has set
    MALLOC_* (mallopt(3)) and so decides what becomes of freed memory.
    """

    def __init__(self) -> None:
        # As in process.keep_freed_memory.
        self._keeps = not any(name.startswith("MALLOC_") for name in os.environ)
        self._unused: dict[int, list[np.ndarray]] = {}

    def vector(self, num_elements: int) -> torch.Tensor:
        """Uninitialized, shape (num_elements,). Its memory is taken back when the last tensor that has it is gone."""
        if not self._keeps:
            return torch.empty(num_elements)
        unused = self._unused.setdefault(num_elements, [])
        try:
            memory = unused.pop()
        except IndexError:
            memory = _aligned(num_elements)
        # torch keeps this very object for as long as a tensor has its memory.
        lent = memory.view()
        weakref.finalize(lent, unused.append, memory).atexit = False
        return torch.from_numpy(lent)

    def like(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Uninitialized tensors of the same names, shapes, types and devices; new ones where they are none of ours."""
        return {name: self._like(tensor) for name, tensor in tensors.items()}

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of tensors, likewise."""
        copies = self.like(tensors)
        with torch.no_grad():
            for name, copy in copies.items():
                copy.copy_(tensors[name])
        return copies

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
            return self.vector(tensor.numel()).view(tensor.shape)
        return torch.empty_like(tensor, requires_grad=False)


def _aligned(num_elements: int) -> np.ndarray:
    memory = np.empty(num_elements + _ALIGNMENT // 4, np.float32)
    start = -memory.ctypes.data % _ALIGNMENT // 4
    return memory[start : start + num_elements]
