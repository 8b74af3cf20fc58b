"""Safetensors files: they are written whole, and read tensor by tensor, mapped into memory and not copied.

Used by checkpoint/file and interchange, which say which error to raise for a file that cannot be read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarm.errors import in_one_line


@contextmanager
def opened(path: Path, fault: type[Exception]) -> Iterator[Any]:
    """Open a file for the block. Raises `fault`, with one line, if it is missing, cut short or of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise fault(f"{path} cannot be read: {error.strerror or in_one_line(error)}") from None
    except SafetensorError as error:
        raise fault(f"{path} cannot be read: it is not a whole safetensors file ({in_one_line(error)})") from None
    except RuntimeError as error:
        # torch opens the file once more by its name, and a run that goes on may just have removed an old checkpoint.
        if path.exists():
            raise
        raise fault(f"{path} cannot be read: it has just been removed ({in_one_line(error)})") from None


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file. Blocks. Raises OSError, with one line that names the file, if it cannot be written."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        # The library makes a file that only its owner can read, whatever the umask. One made here shows the umask.
        path.touch()
        mode = path.stat().st_mode & 0o777
        save_file(whole, path, metadata=None if metadata is None else dict(metadata))
        path.chmod(mode)
    except (SafetensorError, OSError) as error:
        raise OSError(f"cannot write {path}: {getattr(error, 'strerror', None) or in_one_line(error)}") from None
