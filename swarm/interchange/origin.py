"""Where an export takes its weights from: checkpoints, or a run folder.

A model's parameters are read one layer at a time, as they are asked for.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from swarm.checkpoint import file
from swarm.checkpoint.folder import CheckpointFolder
from swarm.config import DataConfig, RunConfig, StagesConfig
from swarm.errors import IntegrityError
from swarm.interchange import run_folder
from swarm.interchange.export import Card, Origin
from swarm.interchange.source import Source
from swarm.model.stages import parameter_shapes


def from_run_folder(folder: Path) -> Origin:
    """The model as it was before the run. Raises ValueError, IntegrityError."""
    config = run_folder.load_config(folder)
    weights = run_folder.open_weights(folder, config)
    return Origin(config=config, load=weights.load, card=Card(round=0, num_samples=0, losses={}))


def from_model_folder(folder: Path) -> Origin:
    """A model as transformers saved it. Raises ValueError."""
    source = Source(folder)
    longest = source.model.max_positions
    tokenizer = str(folder / run_folder.TOKENIZER) if (folder / run_folder.TOKENIZER).is_file() else "bytes"
    config = RunConfig(
        run="model",
        model=source.model,
        stages=StagesConfig(num_stages=1),
        data=DataConfig(sequence_length=longest, tokenizer=tokenizer),
    )
    return Origin(
        config=config,
        load=lambda wanted: dict(source.tensors(wanted)),
        card=Card(round=0, num_samples=0, losses={}),
    )


def from_checkpoints(folder: Path, round_number: int | None) -> Origin:
    """The model as the newest round has it that is whole in a folder, or as a given round has it. Blocks.

    Every file that is used is checked against its own digest.

    Raises:
        IntegrityError: there is no such round, or it does not have all of the model.
    """
    names = file.names(folder)
    if not names:
        raise IntegrityError(f"{folder} has no checkpoints")
    config = file.config_of(folder / str(names[-1]))
    whole = dataclasses.replace(config, stages=StagesConfig(num_stages=1))
    restored = CheckpointFolder(folder, whole).restore(0, parameter_shapes(whole, 0), round_number=round_number)
    if restored is None:
        of_round = "" if round_number is None else f" of round {round_number}"
        raise IntegrityError(f"{folder} has no sound checkpoints{of_round} with all of the model")

    def load(wanted: set[str]) -> Mapping[str, Tensor]:
        return {name: restored.tensors[f"anchor/{name}"] for name in wanted}

    card = Card(round=restored.round, num_samples=restored.run_samples, losses={})
    return Origin(config=restored.config, load=load, card=card)
