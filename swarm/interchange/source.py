"""Reads a model's folder as transformers writes it, tensor by tensor.

The files' headers are checked before any tensor is read: all tensors must be there, with the sizes that the
configuration says, and no unknown ones. Nothing of a folder is ever executed: weights are read from safetensors alone.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.data import hub, tokenizer_files
from swarm.interchange.families.family import TensorRule
from swarm.interchange.families.known import read_config
from swarm.machine import json_file, tensor_file
from swarm.machine.words import counted
from swarm.model import stages

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_HUB_FILES = ("config.json", _ADAPTER, _INDEX, *tokenizer_files.FILES)
"""The files that are downloaded of a model on the hub, besides its weights."""
_HEAD = "lm_head.weight"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of weights that can be read, by their names in safetensors."""


def located(spec: str, say: Callable[[str], object]) -> tuple[Path, str]:
    """Find the model that a user names: a folder here, or a model on the hub, which is downloaded. Blocks.

    Args:
        say: called with a line before a download.

    Returns:
        The folder, and the name for a run that begins with a model of the hub; empty for a folder here.

    Raises:
        ValueError: it is neither.
        PeerUnavailable: it cannot be downloaded.
    """
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return folder, ""
    if not hub.is_name(spec):
        raise ValueError(f"{spec}: there is no such folder")
    say(f"{spec} is no folder here: downloading it from the hub, unless it is in the hub's cache")
    return _downloaded(spec, say), spec.replace("/", "-")[:64]


def _downloaded(name: str, say: Callable[[str], object]) -> Path:
    """The folder of a model on the hub, with those of its weights that are read. Blocks."""
    folder = hub.download(name, _HUB_FILES)
    named = sorted(set(_named(folder))) if (folder / _INDEX).exists() else []
    missing = [file for file in named or [_SINGLE] if not (folder / file).is_file()]
    if missing and not (folder / _SINGLE).is_file():
        found = hub.sizes(name, sorted({_SINGLE, *missing}), revision=folder.name)
        found = {_SINGLE: found[_SINGLE]} if _SINGLE in found else found
        if found:
            say(f"downloading {sum(found.values()) / 1e9:.1f} GB of {name}, {counted(len(found), 'file')} of weights")
            hub.download(name, list(found), revision=folder.name)
    return folder


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    config = RunConfig(model=model, stages=StagesConfig(num_stages=1), data=DataConfig(sequence_length=1))
    return {name: tuple(shape) for name, shape in stages.parameter_shapes(config, 0).items()}


class Source:
    """One folder with a model. `dtype` is the type of the weights; if there are several, the widest."""

    def __init__(self, folder: Path) -> None:
        """Check all headers. Raises ValueError, one line, for whatever is wrong with the folder."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder with a model")
        self.folder = folder
        if (folder / _ADAPTER).is_file() and not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} has only adapters, without the model that they belong to: write the model whole with "
                "swarm-model export --base MODEL, or name the checkpoints with --checkpoint and the model with --base"
            )
        self.family, self.model = read_config(folder / "config.json")
        self._files = _files(folder)
        # A model has at least one tensor for each layer. This is checked first, because the lines below would take
        # minutes and gigabytes for a number of layers that is far too large.
        if self.model.num_layers > len(self._files):
            raise ValueError(
                f"{folder}: config.json has {self.model.num_layers} layers, and the files have only "
                f"{len(self._files)} tensors"
            )
        self.shapes = parameter_shapes(self.model)
        self._rules = {name: rule for rule in self.family.tensors(self.model, self.shapes) for name in rule.ours}
        self.dtype = self._check()

    def tensors(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield some of our parameters, in the folder's types. One tensor of the files is read at a time."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for rule in dict.fromkeys(self._rules[name] for name in self.shapes if name in names):
                theirs = self._find(rule)
                path = self._files[theirs]
                if path not in opened:
                    opened[path] = stack.enter_context(tensor_file.opened(path, ValueError))
                tensor = opened[path].get_tensor(theirs)
                if rule.transposed:
                    tensor = tensor.t()
                parts = tensor.split([self.shapes[name][0] for name in rule.ours])
                for name, part in zip(rule.ours, parts, strict=True):
                    if name in names:
                        yield name, part.contiguous()

    @property
    def files(self) -> list[Path]:
        return sorted(set(self._files.values()))

    def _find(self, rule: TensorRule) -> str:
        """The name under which the files have a tensor. Raises ValueError if none has it."""
        for name in (rule.theirs, rule.theirs.removeprefix(self.family.prefix)):
            if name in self._files:
                return name
        hint = "; if the embedding is the head, tie_word_embeddings in config.json has to be true"
        raise ValueError(f"{self.folder}: no file has the tensor {rule.theirs!r}{hint if rule.theirs == _HEAD else ''}")

    def _check(self) -> torch.dtype:
        """Check the headers against the tensors that the model needs, and return the type of its weights. Raises
        ValueError."""
        wanted = {self._find(rule): rule for rule in dict.fromkeys(self._rules.values())}
        types: dict[str, str] = {}
        for path in self.files:
            with tensor_file.opened(path, ValueError) as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if name in wanted:
                        header = file.get_slice(name)
                        self._check_shape(name, wanted[name], tuple(header.get_shape()))
                        types[header.get_dtype()] = name
                    elif not self._is_harmless(name, file):
                        why = f"is no part of a {self.family.architecture}"
                        if name == _HEAD:
                            why = "is not the embedding; tie_word_embeddings in config.json has to be false"
                        raise ValueError(f"{path}: the tensor {name!r} {why}")
        unknown = types.keys() - DTYPES
        if unknown:
            raise ValueError(
                f"{self.folder}: the tensor {types[min(unknown)]!r} is of type {min(unknown)}, and only "
                f"{', '.join(DTYPES)} can be read"
            )
        return max((DTYPES[name] for name in types), key=lambda dtype: torch.finfo(dtype).bits)

    def _check_shape(self, theirs: str, rule: TensorRule, shape: tuple[int, ...]) -> None:
        first = sum(self.shapes[name][0] for name in rule.ours)
        expected = (first, *self.shapes[rule.ours[0]][1:])
        if rule.transposed:
            expected = expected[::-1]
        if shape != expected:
            raise ValueError(
                f"{self.folder}: the tensor {theirs!r} is {list(shape)}, and config.json makes it {list(expected)}"
            )

    def _is_harmless(self, name: str, file: Any) -> bool:
        """Whether a tensor may be ignored: a table that follows from the configuration, or a tied head's equal copy."""
        if name.endswith(self.family.no_tensors):
            return True
        if name != _HEAD or not self.model.tied_embeddings:
            return False
        embedding = self._find(self._rules["embedding.weight"])
        with tensor_file.opened(self._files[embedding], ValueError) as other:
            return torch.equal(file.get_tensor(name), other.get_tensor(embedding))


def _named(folder: Path) -> Collection[str]:
    """The names of the files that a folder's index names. Raises ValueError if it is no index of such."""
    named = json_file.read_object(folder / _INDEX).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(
            f"{folder / _INDEX} is no index of safetensors files: it has no weight_map with a file's name for each "
            "tensor"
        )
    for file in named.values():
        if Path(file).name != file:
            raise ValueError(f"{folder / _INDEX} names {file!r}, which is not in the folder")
    return named.values()


def _files(folder: Path) -> Mapping[str, Path]:
    """The file of each tensor. Raises ValueError if one of the files is missing, or there is none."""
    # As in transformers, the single file comes first: save_pretrained leaves an older save's index beside it.
    if (folder / _SINGLE).is_file():
        files = {folder / _SINGLE}
    elif (folder / _INDEX).exists():
        files = {folder / file for file in _named(folder)}
        for path in sorted(files):
            if not path.is_file():
                raise ValueError(f"{folder}: the shard {path.name} is missing; download the model again")
    elif any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder} has its weights as a pickle, which can hold code and is never read; save the model with "
            "safe_serialization=True"
        )
    else:
        raise ValueError(f"{folder} has no {_SINGLE} and no {_INDEX}")
    found: dict[str, Path] = {}
    for path in sorted(files):
        with tensor_file.opened(path, ValueError) as opened:
            found |= dict.fromkeys(opened.keys(), path)
    return found
