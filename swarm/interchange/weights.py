"""The weights that a run begins with: safetensors files, one for each layer, and the digest of each tensor.

    weights/index.json               names, files, shapes, types and digests of all tensors
    weights/embedding.safetensors    what comes before the first layer
    weights/layers.0.safetensors     ... one for each layer, so that a stage reads its own under any cut
    weights/head.safetensors         what comes after the last one

Written by an import, read by a stage's first peer and by whoever looks into a model. The digest of all of it is part of
a run's configuration, so each tensor can be checked by itself against what the run began with.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarm.errors import IntegrityError
from swarm.machine.disk import put_in_place, sync

FORMAT = 1
INDEX = "index.json"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """What the index says of one tensor.

    Attributes:
        file: its name within the folder.
        dtype: as torch names it: `float32`, `bfloat16` or `float16`.
        blake3: of its bytes, in hexadecimal.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    blake3: str


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, which is the stem of its file's name."""
    first, second = (*name.split("."), "")[:2]
    if first == "layers":
        return f"layers.{second}"
    return "head" if first == "head" else "embedding"


def write(folder: Path, parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> str:
    """Write the weights part by part, with one part in memory; gives the digest of all of them. Blocks.

    Args:
        folder: is made, and must not be there.
        parts: names as part_of gives them, and the tensors of each.

    Raises:
        IntegrityError: a tensor holds NaN or infinity.
        OSError: it could not be written.
    """
    folder.mkdir()
    entries: dict[str, TensorEntry] = {}
    for part, tensors in parts:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        for name, tensor in whole.items():
            if not bool(tensor.isfinite().all()):
                raise IntegrityError(f"the tensor {name} holds NaN or infinity")
            entries[name] = TensorEntry(
                file=f"{part}.safetensors",
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                blake3=_digest_of(tensor),
            )
        path = folder / f"{part}.safetensors"
        try:
            save_file(whole, path)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        sync(path)
    temporary = folder / f".{INDEX}.tmp"
    temporary.write_text(
        json.dumps({"format": FORMAT, "tensors": {n: asdict(e) for n, e in entries.items()}}, indent=1)
    )
    sync(temporary)
    put_in_place(temporary, folder / INDEX)
    return digest(entries)


def digest(entries: Mapping[str, TensorEntry]) -> str:
    """SHA-256, in hexadecimal, over names, shapes, types and contents; where the tensors lie does not count."""
    values = {name: [list(entry.shape), entry.dtype, entry.blake3] for name, entry in entries.items()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class WeightsFolder:
    """Weights on disk.

    Attributes:
        digest: of all of them, as the index says.
    """

    def __init__(self, path: Path) -> None:
        """Read the index. Raises IntegrityError if there is none, or it is damaged."""
        self.path = path
        try:
            values = json.loads((path / INDEX).read_text(encoding="utf-8"))
            entries = {
                str(name): TensorEntry(
                    file=str(entry["file"]),
                    shape=tuple(map(int, entry["shape"])),
                    dtype=str(entry["dtype"]),
                    blake3=str(entry["blake3"]),
                )
                for name, entry in values["tensors"].items()
            }
        except OSError as error:
            raise IntegrityError(f"cannot read {path / INDEX}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise IntegrityError(f"{path / INDEX} is damaged") from None
        if any(Path(entry.file).name != entry.file for entry in entries.values()):
            raise IntegrityError(f"{path / INDEX} names a file outside of its folder")
        self.entries: Mapping[str, TensorEntry] = entries
        self.digest = digest(entries)

    def load(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some tensors, of the type that they were stored in, each checked against its digest. Blocks.

        Raises:
            IntegrityError: one is missing, damaged, or not what the index says.
        """
        if missing := sorted(set(names) - self.entries.keys()):
            raise IntegrityError(f"{self.path} does not have the tensor {missing[0]}")
        tensors: dict[str, Tensor] = {}
        for file in sorted({self.entries[name].file for name in names}):
            path = self.path / file
            try:
                with safe_open(path, framework="pt") as opened:
                    for name in names:
                        if self.entries[name].file == file:
                            tensors[name] = opened.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise IntegrityError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
        for name, tensor in tensors.items():
            entry = self.entries[name]
            if (tuple(tensor.shape), _digest_of(tensor)) != (entry.shape, entry.blake3):
                raise IntegrityError(f"{self.path / entry.file} is damaged: {name} does not match its digest")
        return tensors


def _digest_of(tensor: Tensor) -> str:
    return blake3(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
