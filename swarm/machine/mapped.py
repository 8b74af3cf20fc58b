"""Memory of files: arrays that need not be in RAM while nothing reads them.

A file has no name, so nothing is left of it when its process ends, however that happens: the system frees its blocks
with the last mapping. What was written goes to the disk when the system wants the RAM, and comes back when it is read.
"""

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np


def floats(folder: Path, num_elements: int) -> np.ndarray:
    """An array of so many float32 numbers, of any values, in a file on the folder's disk. Raises OSError, with one
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
