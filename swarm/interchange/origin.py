"""Where an export takes its weights from: checkpoints, a run folder, or a model's folder.

Parameters are read when the export asks for them, one layer at a time.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from swarm.checkpoint import file
from swarm.checkpoint.folder import CheckpointFolder, Restored
from swarm.checkpoint.keeping import Keeping
from swarm.config import DataConfig, RunConfig, StagesConfig
from swarm.data import tokenizer_files
from swarm.data.tokenizer_files import TOKENIZER
from swarm.errors import IntegrityError
from swarm.interchange import run_folder
from swarm.interchange.export import Card, Load, Origin
from swarm.interchange.source import Source
from swarm.interchange.weights import Weights
from swarm.machine.words import counted
from swarm.model.adapters import adapter_names, merged
from swarm.model.functions import fuses
from swarm.model.stage_module import autocast_dtype
from swarm.model.stages import Transformer, drawn, parameter_shapes, trained_shapes
from swarm.types import Block

logger = logging.getLogger(__name__)

WHEN_WRITTEN = (
    f"a swarm-peer writes one every {Keeping.every} rounds, or as its --checkpoint-every says, and one as it leaves"
)
"""When checkpoints are written: for error messages to users that look for one too early."""
_MOST_LOOKS = 10
"""How often checkpoints are looked for, if they are replaced each time while they are read."""
TOKENIZER_FOLDER = "tokenizer"
"""The folder below a folder of checkpoints in which a stage peer puts the run's tokenizer."""


def from_folder(folder: Path) -> Origin:
    """The model in a run folder, or in a folder as transformers writes it. Raises ValueError, IntegrityError."""
    is_run = (folder / run_folder.CONFIG).is_file()
    return from_run_folder(folder) if is_run else from_model_folder(folder)


def from_run_folder(folder: Path) -> Origin:
    """The model as it was before the run began. Raises ValueError, IntegrityError."""
    config = run_folder.load_config(folder)
    weights = run_folder.open_weights(folder, config)
    card = Card(round=0, num_samples=0, losses={}, digest=config.model.weights)
    return Origin(config=config, load=weights.load, card=card, tokenizer=config.data.tokenizer)


def from_model_folder(folder: Path) -> Origin:
    """A model in a folder as transformers writes it. Raises ValueError."""
    source = Source(folder)
    longest = source.model.max_positions
    tokenizer = str(folder) if (folder / TOKENIZER).is_file() else "bytes"
    config = RunConfig(
        run=run_folder.name_of(folder),
        model=source.model,
        stages=StagesConfig(num_stages=1),
        data=DataConfig(sequence_length=longest, tokenizer=tokenizer),
    )
    return Origin(
        config=config,
        load=lambda wanted: dict(source.tensors(wanted)),
        card=Card(round=0, num_samples=0, losses={}),
        tokenizer=tokenizer,
    )


def from_checkpoints(
    folder: Path, round_number: int | None, base: Weights | None = None, *, path: int = 0
) -> Origin:  # fmt: skip
    """The model at a round, from the checkpoints in a folder. Blocks. Each file is checked against its own digest.

    Args:
        round_number: None for the newest round of which all stages are there.
        path: of a run with several, the path whose model this is.
        base: the model's weights, if the run trains adapters: checkpoints have only these.

    Raises:
        ValueError: there is no such folder or path, or there is a base, and the run trains no adapters.
        IntegrityError: there is no checkpoint yet, or none of the round, or they lack part of the model, or the base
            is another model.
    """
    restored = _restored(folder, round_number, path)

    def trained(wanted: set[str]) -> Mapping[str, Tensor]:
        return {name: restored.tensors[f"anchor/{name}"] for name in wanted}

    card = Card(round=restored.round, num_samples=restored.run_samples, losses={}, digest=restored.lineage)
    data = restored.config.data
    tokenizer = tokenizer_files.place_of(data.tokenizer_files, data.tokenizer, [folder / TOKENIZER_FOLDER])
    return of_trained(restored.config, trained, base, card, tokenizer=tokenizer)


def config_of_checkpoints(folder: Path) -> RunConfig:
    """The configuration of the run that wrote the newest checkpoint in a folder. Raises ValueError if there is no such
    folder, and IntegrityError if it has no checkpoint that can be read."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if not (names := file.names(folder)):
        raise IntegrityError(f"{folder} has no checkpoint yet: {WHEN_WRITTEN}")
    return file.config_of(folder / str(names[-1]))


def _restored(folder: Path, round_number: int | None, path: int) -> Restored:
    """The whole model's state. Raises IntegrityError, or ValueError if the run has no such path.

    A run that goes on replaces its checkpoints, perhaps while they are read. Then those that are there now are read.
    """
    for looks_left in reversed(range(_MOST_LOOKS)):
        names = file.names(folder)
        try:
            config = config_of_checkpoints(folder)
            require_path(config, path)
            if not isinstance(config.model.custom_class, str):
                raise ValueError(
                    f"{folder}: paths of this run have classes of their own (model.custom_class), and its "
                    "checkpoints are only for swarm-peer --resume"
                )
            restored = _of_path(folder, config, round_number, path)
        except IntegrityError:
            if not looks_left or file.names(folder) == names:
                raise
            continue
        if restored is not None:
            return restored
        if file.names(folder) == names:
            break
    of_round = "" if round_number is None else f" of round {round_number}"
    rounds = ", ".join(map(str, sorted({name.round for name in names})))
    raise IntegrityError(
        f"{folder} has no sound checkpoints{of_round} with all of the model; those there are of round {rounds}"
    )


def require_path(config: RunConfig, path: int) -> None:
    """Raise ValueError if a run has no path of this number."""
    if not 0 <= path < len(config.paths):
        raise ValueError(f"--path {path}: the run has {counted(len(config.paths), 'path')}, numbered from 0")


def _of_path(folder: Path, config: RunConfig, round_number: int | None, path: int) -> Restored | None:
    shapes = trained_shapes(config.uncut, 0)
    if len(config.paths) == 1:
        return CheckpointFolder(folder, config.uncut).restore(Block(0), shapes, round_number=round_number)
    checkpoints = CheckpointFolder(folder, config)
    variants, blocks = config.paths[path], config.blocks_of(path)
    found = checkpoints.restore(Block(0), shapes, round_number=round_number, variants=variants)
    if found is not None or round_number is not None or config.rounds.synchronous:
        return found
    # A path that stood still has blocks that stayed behind those which other paths share with it.
    parts = [
        part
        for block in blocks
        if (part := checkpoints.restore(block, trained_shapes(config, block.stage))) is not None
    ]
    if len(parts) < len(blocks):
        return None
    rounds = ", ".join(str(part.round) for part in parts)
    logger.warning("no round has all of path %d: its stages are taken at their newest rounds, %s", path, rounds)
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    lineage = hashlib.sha256("\n".join(part.lineage for part in parts).encode()).hexdigest()
    newest = max(parts, key=lambda part: part.round)
    return dataclasses.replace(newest, tensors=tensors, lineage=lineage)


def of_trained(config: RunConfig, trained: Load, base: Weights | None, card: Card, *, tokenizer: str) -> Origin:
    """A model from its trained parameters: all of them, or those of adapters.

    Args:
        trained: gives trained parameters.
        base: the weights that adapters belong to, if the run began with a model's. Without these weights only the
            adapters can be exported.
        tokenizer: as in Origin.

    Raises:
        ValueError: there is a base, and the run trains no adapters.
        IntegrityError: the base is another model than the run began with.
    """
    if not config.lora.is_on:
        if base is not None:
            raise ValueError("this run trains the model's own weights, which need no other ones: leave --base out")
        return Origin(config=config, load=trained, card=card, tokenizer=tokenizer)
    frozen = _frozen(config, base)
    names, scale = adapter_names(config), config.lora.scale

    def load(wanted: set[str]) -> Mapping[str, Tensor]:
        tensors = {name: tensor.float() for name, tensor in frozen(wanted).items()}
        for name in wanted & names.keys():
            a, b = names[name].a, names[name].b
            adapter = trained({a, b})
            tensors[name] = merged(tensors[name], adapter[a], adapter[b], scale)
        return tensors

    base_dtype = None if base is None else base.index.dtype
    return Origin(
        config=config, load=load, adapters=trained, base_dtype=base_dtype, card=card, tokenizer=tokenizer
    )  # fmt: skip


def _frozen(config: RunConfig, base: Weights | None) -> Load:
    """A function that gives the weights that adapters belong to, or raises IntegrityError if they are needed."""
    if base is not None:
        base.require(config.model.weights)
        return base.load
    if config.model.weights:

        def missing(_: set[str]) -> Mapping[str, Tensor]:
            raise IntegrityError(
                "the run trains adapters, and the model that they belong to is not in its checkpoints: name it "
                "with --base, as the run's first peer did with --model, or take the adapters alone with swarm-model "
                "export --adapter"
            )

        return missing
    shapes = parameter_shapes(config.uncut, 0)
    return lambda wanted: {name: drawn(name, shapes[name], config) for name in wanted}


def transformer(found: Origin, config: RunConfig, device: torch.device) -> Transformer:
    """The whole model with its weights on a device. Matrices have the type of model.autocast, and else float32: reading
    them is most of what a token takes. Raises IntegrityError if the weights are not those of the model."""
    model = Transformer(config, fused=fuses(device))
    for name, parameter in model.named_parameters():
        value = found.load({name})[name]
        dtype = autocast_dtype(config.model) if value.ndim > 1 else None
        parameter.data = value.to(device, dtype or torch.float32)
    return model.to(device)
