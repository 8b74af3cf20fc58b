"""Safetensors files: written whole or tensor by tensor, and read tensor by tensor, mapped into memory, not copied."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Size, Tensor, empty, float32, uint8

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


class Stream:
    """Writes a file tensor by tensor, so that they need not fit into memory together. Until it is closed, the file is
    refused by all who read it."""

    def __init__(self, path: Path, shapes: Mapping[str, Size], metadata: Mapping[str, str]) -> None:
        """`shapes` are those of all tensors, which are of float32 and come in the order of their names. `metadata` is
        as long as what the file is going to have. Raises OSError if the file cannot be made."""
        self._shapes, self._places, end = dict(sorted(shapes.items())), dict[str, tuple[int, int]](), 0
        for name, shape in self._shapes.items():
            start, end = end, end + float32.itemsize * math.prod(shape)
            self._places[name] = start, end
        # Tensors begin at a multiple of 8, as in the library's own files.
        self._begin = -(-len(self._header(metadata)) // 8) * 8 + 8
        self._path, self._file = path, path.open("w+b")
        self._file.seek(self._begin)

    def add(self, tensor: Tensor) -> None:
        """Write the next tensor, which is on the CPU. Blocks. Raises OSError."""
        assert tensor.dtype is float32
        self._file.write(bytes_of(tensor))

    def keys(self) -> Collection[str]:
        return self._shapes.keys()

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor again, once all are written. Blocks. Raises OSError."""
        tensor = empty(self._shapes[name])
        self._file.seek(self._begin + self._places[name][0])
        self._file.readinto(bytes_of(tensor))
        return tensor

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the metadata, and with it the file is whole. Blocks. Raises OSError."""
        header = self._header(metadata).ljust(self._begin - 8)
        assert len(header) == self._begin - 8, "the metadata are as long as they were said to be"
        with self._file:
            self._file.seek(0)
            self._file.write(len(header).to_bytes(8, "little") + header)

    def discard(self) -> None:
        for step in (self._file.close, self._path.unlink):
            with suppress(OSError):
                step()

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        entries = {
            name: {"dtype": "F32", "shape": list(self._shapes[name]), "data_offsets": place}
            for name, place in self._places.items()
        }
        return json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":")).encode()


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes: a view of its memory, if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(uint8).numpy().data
