"""One checkpoint: a block's state at the beginning of a round, as a safetensors file that is whole or refused.

    stage-1-of-3.round-500.safetensors      tensors `anchor/NAME` and `outer/NAME/KEY`; all else is in the metadata
    stage-1.2-of-3.round-500.safetensors    the same of variant 2 of stage 1

Parameters are named by their place in the whole model, so the files of one cut make up the stages of any other. A file
is never replaced by one of another branch of the run.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from swarm import config as configs
from swarm.config import DataConfig, RunConfig, Timeline, forbidden_changes
from swarm.errors import IntegrityError
from swarm.machine import json_file, tensor_file
from swarm.machine.disk import put_in_place, sync
from swarm.types import Block

logger = logging.getLogger(__name__)

FORMAT = 1
TEXT = "data.digest"
"""The configuration's field that identifies the run's text."""
SET_ASIDE = ".set-aside"
"""Added to the name of a checkpoint that the run no longer uses, but that its owner may still want."""
UNKNOWN = 64 * "0"
"""Stands for a digest until it is known."""
ABANDONED_SECONDS = 3600.0
"""A temporary file that has not changed for this long is not being written any more."""
Tensors = Mapping[str, torch.Tensor]
_AMENDMENTS = "amendments"
_LEFT_OUT = ("variant", 0), (_AMENDMENTS, ()), ("tally", "")
"""Is not written, as in files of releases that had no such things."""


@dataclass(frozen=True, order=True, kw_only=True)
class FileName:
    """The parts of a checkpoint's name. Names are ordered by their rounds."""

    round: int
    num_stages: int
    stage: int
    variant: int = 0

    @property
    def block(self) -> Block:
        return Block(self.stage, self.variant)

    def __str__(self) -> str:
        return f"stage-{self.block}-of-{self.num_stages}.round-{self.round}.safetensors"


def names(folder: Path) -> list[FileName]:
    pattern = re.compile(r"stage-(\d+)(?:\.([1-9]\d*))?-of-(\d+)\.round-(\d+)\.safetensors")
    matches = [pattern.fullmatch(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    numbers = [tuple(map(int, match.groups("0"))) for match in matches if match is not None]
    return sorted(
        FileName(round=number, num_stages=of, stage=stage, variant=variant) for stage, variant, of, number in numbers
    )


@dataclass(frozen=True, kw_only=True)
class Header:
    """A checkpoint's metadata.

    Attributes:
        config: the run's configuration when the checkpoint was written.
        run_samples: the samples that the run had committed when the round began.
        lineage: hash chain over the rounds before it.
        highest_microbatch: the highest id that the block had seen when the checkpoint was written; -1 for none.
        amendments: the run's amendments that the writer knew.
        tally: the block's tally (training/tally), as text; empty in files of earlier releases.
        state_digest: the BLAKE3 digest of the state, which the block's peers compare and the event log names. It
            identifies the state. Another digest, over the whole file, shows whether the file is complete.
    """

    config: RunConfig
    stage: int
    round: int
    run_samples: int
    lineage: str
    highest_microbatch: int
    state_digest: str
    variant: int = 0
    amendments: tuple[str, ...] = ()
    tally: str = ""

    @property
    def block(self) -> Block:
        return Block(self.stage, self.variant)

    @property
    def amended(self) -> RunConfig:
        """The configuration of the round. Raises IntegrityError if an amendment is none by the run's owner."""
        return Timeline(self.config, self.amendments).at(self.round)

    @property
    def name(self) -> FileName:
        num_stages = self.config.stages.num_stages
        return FileName(round=self.round, num_stages=num_stages, stage=self.stage, variant=self.variant)


def write(folder: Path, header: Header, tensors: Tensors, *, owner: str) -> Path:
    """Write one checkpoint. Once this returns, it survives a power cut. Blocks.

    If the process dies, the folder holds either the whole new file or the former one. A former file of another lineage
    is set aside. So a stage that began anew does not destroy its last checkpoint when it comes to the same round.

    Args:
        owner: name of the writer; no two writers of one folder may have the same.

    Raises:
        IntegrityError: the state holds NaN or infinity. As the newest checkpoint it would take the place of a sound
            one.
        OSError: the file could not be written. No part of it is left.
    """
    draft = Draft(folder, header, {name: tensor.shape for name, tensor in tensors.items()}, owner=owner)
    for name, tensor in sorted(tensors.items()):
        draft.add(name, tensor)
    return draft.finish(header)


class Draft:
    """A checkpoint that is written tensor by tensor, perhaps before its lineage and its state's digest are known.

    A fault on the way is raised at the end, because the processes that put the tensors together go on without it.
    """

    def __init__(self, folder: Path, header: Header, shapes: Mapping[str, torch.Size], *, owner: str) -> None:
        """`header` is the checkpoint's header, with any 64 digits for the lineage and the digest. `shapes` are those of
        all tensors, which are of float32."""
        self._path, self._temporary = folder / str(header.name), folder / f".{header.name}.{owner}.tmp"
        self._stream: tensor_file.Stream | None = None
        self._fault: Exception | None = None
        with self._noted():
            self._stream = tensor_file.Stream(self._temporary, shapes, {**_pack(header), "sha256": UNKNOWN})

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, which is on the CPU. They come in the order of their names. Blocks."""
        with self._noted():
            if self._stream is not None and self._fault is None:
                _require_finite("the state", {name: tensor})
                self._stream.add(tensor)

    def finish(self, header: Header) -> Path:
        """Complete the file as `write` does. Blocks. Raises what `write` raises, for any of the tensors."""
        try:
            if self._stream is None or self._fault is not None:
                raise self._fault or AssertionError("without a stream there is a fault")
            metadata = _pack(header)
            self._stream.close({**metadata, "sha256": _sha256(metadata, self._stream)})
            # Synced before the former file is set aside, so that a power cut in between loses neither file.
            sync(self._temporary)
            if lineage(self._path) not in ("", header.lineage):
                aside = set_aside(self._path).name
                logger.warning("%s is of another branch of the run: it is kept, as %s", self._path, aside)
            put_in_place(self._temporary, self._path)
        except BaseException:
            self.discard()
            raise
        return self._path

    def discard(self) -> None:
        if self._stream is not None:
            self._stream.discard()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep what the block raises for the end. torch raises RuntimeError when there is no memory."""
        try:
            yield
        except (OSError, IntegrityError, RuntimeError, MemoryError) as error:
            self._fault = error


def remove_unfinished(folder: Path, owner: str) -> None:
    """Remove the temporary files that a killed process of this owner left, and old ones of any owner."""
    oldest = time.time() - ABANDONED_SECONDS
    for leftover in folder.glob(".stage-*.safetensors.*.tmp"):
        if leftover.name.endswith(f".safetensors.{owner}.tmp"):
            leftover.unlink(missing_ok=True)
        else:
            # Another new process may have removed it already, or the file may belong to another user.
            with suppress(OSError):
                if leftover.stat().st_mtime < oldest:
                    leftover.unlink()


class OfAnotherRun(IntegrityError):
    """A sound file of another run. The files beside it may be of that run too."""


def read_header(path: Path, config: RunConfig) -> Header:
    """Read and check all of a file, with one tensor at a time in memory. Blocks. Raises IntegrityError if the file is
    cut short, altered, of another run, or holds NaN or infinity. The message names the file and the fault."""
    with tensor_file.opened(path, IntegrityError) as file:
        metadata: dict[str, str] = file.metadata() or {}
        stated = metadata.pop("sha256", "")
        if _sha256(metadata, file) != stated:
            raise IntegrityError(f"{path} is damaged: its contents do not match their digest")
        _require_finite(str(path), file)
    if metadata.get("format") != str(FORMAT):
        raise IntegrityError(f"{path} has format {metadata.get('format')}, and this software reads {FORMAT}")
    header = _unpack(metadata, path)
    if str(header.name) != path.name:
        raise IntegrityError(f"{path} was renamed: it is {header.name}")
    if difference := difference_of(header.amended if header.config != config else config, config):
        raise OfAnotherRun(f"{path} is of another run: {difference}")
    return header


def lineage(path: Path) -> str:
    """The lineage that a file states. Empty if there is no such file, or it is unreadable."""
    try:
        with tensor_file.opened(path, IntegrityError) as file:
            return str((file.metadata() or {}).get("lineage", ""))
    except IntegrityError:
        return ""


def set_aside(path: Path) -> Path:
    """Give a checkpoint a name under which it is not read, and return that name. Raises OSError."""
    number = 1
    while (target := path.with_name(f"{path.name}{f'.{number}' if number > 1 else ''}{SET_ASIDE}")).exists():
        number += 1
    # Another peer that uses the folder may have renamed it already.
    with suppress(FileNotFoundError):
        path.rename(target)
    return target


def difference(path: Path, config: RunConfig) -> str:
    """The reason why a file's header shows another run than this one. Empty if it is this run, or the file is
    unreadable."""
    try:
        with tensor_file.opened(path, IntegrityError) as file:
            header = _unpack(file.metadata() or {}, path)
            return difference_of(header.amended if header.config != config else config, config)
    except IntegrityError:
        return ""


def config_of(path: Path) -> RunConfig:
    """The configuration in a file's header. Raises IntegrityError if it is unreadable."""
    with tensor_file.opened(path, IntegrityError) as file:
        return _unpack(file.metadata() or {}, path).config


def parameters(path: Path) -> set[str]:
    """Names of the parameters whose state a file holds. Raises IntegrityError if it cannot be read."""
    with tensor_file.opened(path, IntegrityError) as file:
        return {key.removeprefix("anchor/") for key in file.keys() if key.startswith("anchor/")}  # noqa: SIM118 - no mapping


def load(path: Path, wanted: Collection[str]) -> dict[str, torch.Tensor]:
    """The state of some parameters: `anchor/NAME` and every `outer/NAME/KEY`. They may share the file's memory.

    Raises IntegrityError if the file cannot be read.
    """
    with tensor_file.opened(path, IntegrityError) as file:
        found = [key for key in file.keys() if f"{key}/".split("/")[1] in wanted]  # noqa: SIM118 - no mapping
        return {key: file.get_tensor(key) for key in found}


def _pack(header: Header) -> dict[str, str]:
    values = {
        name: json.dumps(value) if name == _AMENDMENTS else value
        for name, value in vars(header).items()
        if name != "config" and (name, value) not in _LEFT_OUT
    } | {
        "format": FORMAT,
        "run": header.config.run,
        "config": configs.to_json(header.config),
        "config_digest": header.config.digest,
        "num_stages": header.config.stages.num_stages,
    }
    return {name: str(value) for name, value in values.items()}


def _unpack(metadata: Mapping[str, str], path: Path) -> Header:
    try:
        config = configs.from_json(metadata["config"], source="its configuration")
        written = {"variant": "0", "tally": "", **metadata}
        values: dict[str, Any] = {
            each.name: int(written[each.name]) if each.type is int else written[each.name]
            for each in fields(Header)
            if each.name not in ("config", _AMENDMENTS)
        }
        amendments = json_file.parse(metadata.get(_AMENDMENTS, "[]"))
        if not (isinstance(amendments, list) and all(isinstance(each, str) for each in amendments)):
            raise ValueError("its amendments are no list of texts")
        return Header(config=config, amendments=tuple(amendments), **values)
    except (KeyError, ValueError) as error:
        raise IntegrityError(f"{path} was written by another release: {error}") from None


def difference_of(theirs: RunConfig, ours: RunConfig) -> str:
    """The differences that make two configurations those of different runs, in words. Empty if there is none."""
    forbidden = forbidden_changes(theirs, ours)
    words = [
        f"{name} is {there!r} in it and {here!r} here" for name, (there, here) in forbidden.items() if name != TEXT
    ]
    return ", ".join([*words, *([_other_text(theirs.data, ours.data)] if TEXT in forbidden else [])])


def _other_text(theirs: DataConfig, ours: DataConfig) -> str:
    named = [", ".join(data.source_names) for data in (theirs, ours)]
    if theirs.dataset_digests and sorted(theirs.dataset_digests) == sorted(ours.dataset_digests):
        return f"its datasets are {named[0]}, and here they are in another order: give --dataset for each as before"
    digests = [f"{data.digest[:12] or 'not known'}" for data in (theirs, ours)]
    return (
        f"its text is {named[0]} ({digests[0]}), and here it is {named[1]} ({digests[1]}): begin the run with the same "
        "--dataset as before"
    )


def _require_finite(what: str, tensors: Any) -> None:
    """Raise IntegrityError if some tensor holds NaN or infinity."""
    for name in tensors.keys():  # noqa: SIM118 - a file has no other iterator
        tensor = tensors[name] if isinstance(tensors, Mapping) else tensors.get_tensor(name)
        if not bool(tensor.isfinite().all()):
            raise IntegrityError(f"{what} holds NaN or infinity, in {name}")


def _sha256(metadata: Mapping[str, str], tensors: Any) -> str:
    """Digest over everything that is in a file, except for this digest."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors.keys()):
        tensor = tensors.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor_file.bytes_of(tensor))
    return digest.hexdigest()
