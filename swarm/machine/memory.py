"""The memory of large tensors: kept, since each round needs it again at the same sizes, or in files.

The C library may return freed memory to the system, however it is configured: protobuf makes it return all free memory
after each 10,000 freed pieces of messages (`upb_trim_allocfunc` in its python/protobuf.c). Then the system has to clear
every page anew, which took 14 µs a page on a virtual machine. Besides, small objects are put into the gaps that one
round's vectors leave, and the next round's vectors do not fit there.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

_ALIGNMENT = 64
"""A vector begins at a multiple of this many bytes, a cache line, as torch's own tensors do."""


class Recycler:
    """Makes float32 vectors on the CPU in the memory of earlier vectors that are not used any more.

    Args:
        allocate: gives an array of so many float32 numbers where there is no such memory; None takes RAM.

    Safe from any thread. The memory is kept as long as this object. None is kept if the user has set a MALLOC_*
    variable (mallopt(3)), to decide themselves what becomes of freed memory.
    """

    def __init__(self, allocate: Callable[[int], np.ndarray] | None = None) -> None:
        self._allocate = allocate or _aligned
        # process.keep_freed_memory respects these variables in the same way.
        self._keeps = not any(name.startswith("MALLOC_") for name in os.environ)
        self._unused: dict[int, list[np.ndarray]] = {}

    def vector(self, num_elements: int) -> torch.Tensor:
        """An uninitialized vector (num_elements,). Its memory comes back when the last tensor that uses it is gone."""
        if not self._keeps:
            return torch.from_numpy(self._allocate(num_elements))
        unused = self._unused.setdefault(num_elements, [])
        try:
            memory = unused.pop()
        except IndexError:
            memory = self._allocate(num_elements)
        # torch keeps the array `lent` alive as long as a tensor uses its memory.
        lent = memory.view()
        weakref.finalize(lent, unused.append, memory).atexit = False
        return torch.from_numpy(lent)

    def like(
        self, tensors: Mapping[str, torch.Tensor], types: Mapping[str, torch.dtype] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        """Uninitialized tensors of the same names, shapes and devices, and of the same types or those in `types`. Only
        what is on the CPU is recycled."""
        return {name: self._like(tensor, types.get(name, tensor.dtype)) for name, tensor in tensors.items()}

    def copies(
        self, tensors: Mapping[str, torch.Tensor], types: Mapping[str, torch.dtype] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        copies = self.like(tensors, types)
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(list(copies.values()), [tensors[name] for name in copies])
        return copies

    def _like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.device.type == "cpu" and dtype.itemsize <= 4:
            num_elements = tensor.numel()
            return self.vector(-(-num_elements * dtype.itemsize // 4)).view(dtype)[:num_elements].view(tensor.shape)
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)


def _aligned(num_elements: int) -> np.ndarray:
    memory = np.empty(num_elements + _ALIGNMENT // 4, np.float32)
    start = -memory.ctypes.data % _ALIGNMENT // 4
    return memory[start : start + num_elements]


def in_file(folder: Path, num_elements: int) -> np.ndarray:
    """An array of so many float32 numbers, of any values, in a file on the folder's disk: it need not be in RAM while
    nothing reads it. The file has no name, so nothing is left of it however its process ends. Raises OSError, with one
    line, if there is no room."""
    num_bytes = max(1, num_elements) * np.float32().nbytes
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # With all blocks there, no later write finds the disk full, which would end the process by a signal.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.truncate(num_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.float32, num_elements)
    except OSError as error:
        raise OSError(f"{num_bytes} bytes cannot be had in {folder}: {error.strerror}") from None
