"""What Python, torch and the system say when memory runs out."""

import errno

import pytest
import torch

from swarm.machine.out_of_memory import is_out_of_memory, what_was_asked


def _of_torch() -> RuntimeError:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (_of_torch(), "1048576.0 TiB"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.50 GiB. GPU 0 has"), "40.50 GiB"),
        (RuntimeError("CUDA error: out of memory"), "what was needed"),
        (RuntimeError("std::bad_alloc"), "what was needed"),
        (RuntimeError("can't start new thread"), "another thread"),
        (MemoryError(), "what was needed"),
        (MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"), "7.45 GiB"),
        (ImportError("/x/libtorch_cpu.so: failed to map segment from shared object"), "the library libtorch_cpu.so"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "what was needed"),
    ],
)
def test_all_who_say_so(error: Exception, asked: str) -> None:
    assert is_out_of_memory(error)
    assert what_was_asked(error) == asked


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("memory format is not supported"),
        ImportError("cannot import name 'memory'"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("out of memory"),
    ],
)
def test_what_is_about_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)
