"""The weights that a run begins with: their index, and the files with their tensors.

    weights/index.json               shape, type and digests of all tensors
    weights/embedding.safetensors    the parameters before the first layer
    weights/layers.0.safetensors     ... one file for each layer, so that a stage reads its own under any cut
    weights/head.safetensors         the parameters after the last layer

The digest of the index is part of a run's configuration, and the index has a digest for each segment of a tensor. So
each segment that a peer reads, or gets from another peer, can be checked against the run's configuration. The tensors
are in a folder like this one, which may lack some files, or in a model's folder as it came from Hugging Face.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from swarm.errors import IntegrityError
from swarm.machine import json_file, tensor_file
from swarm.machine.disk import replacing

INDEX = "index.json"
SEGMENT_BYTES = 4 << 20
"""The size of a tensor's segments. Each segment has a digest of its own, and is fetched as a whole."""
MOST_INDEX_BYTES = 64 << 20
"""The largest size of an index; the index of a model of 140 GB takes 3 MB."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor's entry in the index.

    Attributes:
        dtype: torch's name of the type: `float32`, `bfloat16` or `float16`.
        sha256: the digest of each segment of SEGMENT_BYTES, in hexadecimal.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: tuple[str, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Index:
    """All tensors of a model, by name.

    Attributes:
        content: the index as bytes, which are the same on every machine.
        digest: SHA-256 of `content`, in hexadecimal; `model.weights` in a run's configuration.
    """

    def __init__(self, content: bytes) -> None:
        """Parse an index. Raises IntegrityError if it is damaged."""
        self.content = content
        self.digest = hashlib.sha256(content).hexdigest()
        try:
            self.entries: Mapping[str, TensorEntry] = {
                str(name): TensorEntry(
                    shape=tuple(map(int, entry["shape"])),
                    dtype=str(entry["dtype"]),
                    sha256=tuple(map(str, entry["sha256"])),
                )
                for name, entry in json_file.parse(content).items()
            }
            is_sound = all(len(e.sha256) == -(-e.num_bytes // SEGMENT_BYTES) for e in self.entries.values())
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError):
            is_sound = False
        if not is_sound:
            raise IntegrityError("the index of the weights is damaged")

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> "Index":
        """Make the index of these tensors, one by one. Blocks. Raises IntegrityError if one holds NaN or infinity."""
        return cls.from_entries(dict((name, describe(name, tensor)) for name, tensor in tensors))

    @classmethod
    def from_entries(cls, entries: Mapping[str, TensorEntry]) -> "Index":
        values = {name: {"shape": e.shape, "dtype": e.dtype, "sha256": e.sha256} for name, e in entries.items()}
        return cls(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of the tensors; if there are several, the widest."""
        return max((entry.torch_dtype for entry in self.entries.values()), key=lambda dtype: torch.finfo(dtype).bits)

    @cached_property
    def places(self) -> Mapping[str, list[tuple[str, int]]]:
        """For each digest, the places of segments with this digest: the tensor's name, and the segment's number."""
        places: dict[str, list[tuple[str, int]]] = {}
        for name, entry in self.entries.items():
            for number, digest in enumerate(entry.sha256):
                places.setdefault(digest, []).append((name, number))
        return places


@dataclass(eq=False)
class Weights:
    """A model's tensors at one place, each checked against the index when it is read. `index` is the index of the whole
    model, of which this place may lack some tensors."""

    index: Index
    read: Callable[[set[str]], Iterable[tuple[str, Tensor]]]
    """Gives some tensors, unchecked. Raises ValueError or IntegrityError."""
    place: Path
    """Named in error messages."""
    holds: Callable[[str], bool] = lambda _: True
    """Whether this place has a tensor."""

    def require(self, digest: str) -> None:
        """Raise IntegrityError if these are not the weights with which a run begins. `digest` is `model.weights` of the
        run."""
        if self.index.digest != digest:
            raise IntegrityError(
                f"{self.place} has other weights ({self.index.digest[:12]}) than the run begins with "
                f"({digest[:12] or 'random ones'})"
            )

    def has(self, names: Collection[str]) -> bool:
        return all(name in self.index.entries and self.holds(name) for name in names)

    def load(
        self, names: Collection[str], cut: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
    ) -> dict[str, Tensor]:
        """Read some tensors, in the types in which they are stored, or the view that `cut` makes of each. Only the
        segments in which the views lie are read and checked, unless the files have a tensor in another layout. Blocks.
        Raises IntegrityError if a tensor is missing, damaged, or not what the index says."""
        if missing := sorted(set(names) - self.index.entries.keys()):
            raise IntegrityError(f"{self.place} does not have the tensor {missing[0]}")
        views = dict[str, Tensor]()
        for name, tensor in dict(self.read(set(names))).items():
            entry, views[name] = self.index.entries[name], cut(name, tensor)
            segments = _segments_of(tensor, views[name])
            if (tuple(tensor.shape), digests_of(tensor, segments)) != (entry.shape, entry.sha256[segments]):
                raise IntegrityError(
                    f"{self.place} is damaged, or is not what the run begins with: {name} does not match its digest"
                )
        return views

    def content(self, sha256: str) -> bytes | None:
        """Read the index, or a segment of a tensor, by its digest; None if it is not here. Blocks.

        The segment is not checked here: the process that asked for it does that.

        Raises:
            IntegrityError, ValueError: it cannot be read.
        """
        if sha256 == self.index.digest:
            return self.index.content
        here = [place for place in self.index.places.get(sha256, ()) if self.holds(place[0])]
        if not here:
            return None
        name, number = here[0]
        ((_, tensor),) = self.read({name})
        return bytes(tensor_file.bytes_of(tensor)[number * SEGMENT_BYTES : (number + 1) * SEGMENT_BYTES])


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: its file is PART.safetensors."""
    first, second = (*name.split("."), "")[:2]
    if first == "layers":
        return f"layers.{second}"
    return "head" if first == "head" else "embedding"


def write(folder: Path, parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> Index:
    """Write the weights part by part, with one part in memory, and return their index. Blocks.

    Args:
        folder: the folder to make; it must not exist.
        parts: the names of parts, as part_of gives them, and the tensors of each.

    Raises:
        IntegrityError: a tensor holds NaN or infinity.
        OSError: the folder cannot be written.
    """
    folder.mkdir()
    entries: dict[str, TensorEntry] = {}
    for part, tensors in parts:
        entries |= {name: describe(name, tensor) for name, tensor in tensors.items()}
        write_part(folder, part, tensors)
    index = Index.from_entries(entries)
    write_index(folder, index)
    return index


def write_part(folder: Path, part: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the file of one part, whole or not at all. Blocks. Raises OSError."""
    with replacing(folder / f"{part}.safetensors") as path:
        tensor_file.write(path, tensors)


def write_index(folder: Path, index: Index) -> None:
    """Write the index beside its parts. Blocks. Raises OSError."""
    with replacing(folder / INDEX) as path:
        path.write_bytes(index.content)


def open_folder(folder: Path) -> Weights:
    """Open a folder as `write` makes it; parts may be missing. Raises IntegrityError without a sound index."""
    try:
        index = Index((folder / INDEX).read_bytes())
    except OSError as error:
        raise IntegrityError(f"cannot read {folder / INDEX}: {error.strerror}") from None
    except IntegrityError:
        raise IntegrityError(f"{folder / INDEX} is damaged") from None

    def read(names: set[str]) -> Iterator[tuple[str, Tensor]]:
        for path in sorted({_path(folder, name) for name in names}):
            with tensor_file.opened(path, IntegrityError) as file:
                for name in names:
                    if _path(folder, name) == path:
                        yield name, file.get_tensor(name)

    return Weights(index, read, place=folder, holds=lambda name: _path(folder, name).is_file())


def describe(name: str, tensor: Tensor) -> TensorEntry:
    """Make a tensor's entry in the index. Blocks. Raises IntegrityError if the tensor holds NaN or infinity."""
    if not bool(tensor.isfinite().all()):
        raise IntegrityError(f"the tensor {name} holds NaN or infinity")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(shape=tuple(tensor.shape), dtype=dtype, sha256=digests_of(tensor))


def digests_of(tensor: Tensor, segments: slice = slice(None)) -> tuple[str, ...]:
    """The digest of each segment of a tensor, or of some of them: SHA-256 in hexadecimal."""
    content = tensor_file.bytes_of(tensor)
    starts = range(0, len(content), SEGMENT_BYTES)[segments]
    return tuple(hashlib.sha256(content[start : start + SEGMENT_BYTES]).hexdigest() for start in starts)


def _segments_of(whole: Tensor, view: Tensor) -> slice:
    """The segments of a tensor from the first byte of a view of it to the last one."""
    if view.numel() == 0:
        return slice(0)
    first = view.storage_offset() - whole.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return slice(first * view.itemsize // SEGMENT_BYTES, last * view.itemsize // SEGMENT_BYTES + 1)


def empty(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=entry.torch_dtype)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{part_of(name)}.safetensors"
