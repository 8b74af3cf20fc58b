"""A run folder: a configuration, the weights that the run begins with, and the tokenizer.

    DIR/run.toml           the configuration of the run that swarm-peer --model DIR begins
    DIR/weights/           see weights.py
    DIR/tokenizer.json     and the other files of a tokenizer, for the export

`import_model` makes a run folder from a model's folder. Either the whole folder is there at the end, or nothing.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from swarm import config as configs
from swarm.config import DataConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig
from swarm.config.data import CLASS, Format
from swarm.data import chat, sources, tokenizer_files, tokenizers
from swarm.data.chat import ChatTemplate
from swarm.data.tokenizer_files import TOKENIZER
from swarm.data.tokenizers import ByteTokenizer
from swarm.interchange import weights
from swarm.interchange.source import Source
from swarm.interchange.weights import Index, Weights
from swarm.machine.disk import whole_folder

CONFIG, WEIGHTS = "run.toml", "weights"
OPEN_DATA = DataConfig(sequence_length=0, microbatch_size=0)
OPEN_ROUNDS = RoundsConfig(round_samples=0, inner_batch_samples=0)
"""A run that begins with a model leaves its sizes to its first peer, which knows the text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """How the run is to begin.

    Attributes:
        num_stages: the number of stages; 0 for two, or one if the model has a single layer.
        dataset: one or several datasets to train on; if empty, the configuration's default.
        run: the run's name; if empty, the name of the source's folder.
        settings: further settings, each as `section.key=value`.
    """

    num_stages: int = 0
    dataset: tuple[str, ...] = ()
    format: Format = "text"
    run: str = ""
    settings: tuple[str, ...] = ()


def import_model(source: Source, output: Path, options: ImportOptions) -> RunConfig:
    """Make a run folder, and return its configuration. Blocks, and has one layer of the model in memory. Raises
    ValueError if the output exists, the configuration is not valid, or there is no such dataset on this machine,
    IntegrityError if a weight is no finite number, and OSError if the folder cannot be written."""
    with whole_folder(output) as folder:
        config = configs.with_settings(config_of(source, options, tokenizer=output), options.settings)
        _require_run(config, source)
        config = with_weights(config, weights.write(folder / WEIGHTS, _parts(source)))
        tokenizer_files.copy(source.folder, folder)
        (folder / CONFIG).write_text(to_toml(config), encoding="utf-8")
    return config


def _require_run(config: RunConfig, source: Source) -> None:
    """Raise ValueError if no run could begin with this configuration, as the run folder will have it."""
    if config.data.tokenizer == ByteTokenizer.identity and config.model.vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(
            f"{source.folder} has no {TOKENIZER}, and without one a run reads bytes, for which the model's vocabulary "
            f"of {config.model.vocab_size} is too small ({ByteTokenizer.vocab_size}): put the model's {TOKENIZER} there"
        )
    for path in (config.data.tokenizer, *config.data.datasets):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{path!r} is no UTF-8 text, and {CONFIG} has to name it: rename it") from None
    _require_no_class(config)
    for dataset in config.data.datasets:
        sources.require_there(dataset)


def _require_no_class(config: RunConfig) -> None:
    """Raise ValueError if a text or the tokenizer is a class: a folder may come from others, and must not name code to
    run."""
    for option, names in (("--dataset", config.data.classes), ("--tokenizer", [config.data.tokenizer])):
        if names and names[0].startswith(CLASS):
            raise ValueError(f"{CONFIG} must not name {names[0]!r}: give it with {option} when the run begins")


def _parts(source: Source) -> Iterator[tuple[str, dict[str, Tensor]]]:
    names: dict[str, set[str]] = {}
    for name in source.shapes:
        names.setdefault(weights.part_of(name), set()).add(name)
    for part, members in names.items():
        yield part, dict(source.tensors(members))


def name_of(folder: Path) -> str:
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        folder = Path(folder.parent.parent.name.removeprefix("models--").replace("--", "-"))
    return re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-")[:64] or "model"


def config_of(source: Source, options: ImportOptions, *, tokenizer: Path) -> RunConfig:
    """The configuration of a run that begins with a model, still without the digest of its weights. `tokenizer` is the
    folder in which the tokenizer will be, if the source has one. Raises ValueError if the configuration is not valid,
    or the tokenizer has more tokens than the model."""
    model = dataclasses.replace(source.model, autocast="auto")
    name = options.run or name_of(source.folder)
    data = dataclasses.replace(OPEN_DATA, dataset=options.dataset or OPEN_DATA.dataset, format=options.format)
    tokenizer_files.require_json(source.folder / TOKENIZER)
    if (source.folder / TOKENIZER).is_file():
        tokenizers.load_for_run(dataclasses.replace(data, tokenizer=str(source.folder)), vocab_size=model.vocab_size)
        data = dataclasses.replace(data, tokenizer=str(tokenizer.resolve()))
    _require_sound_texts(source.folder, is_chat=data.has_conversations)
    num_stages = options.num_stages or min(2, model.num_layers)
    stages, wire = StagesConfig(num_stages=num_stages), WireConfig(dtype="auto")
    return RunConfig(run=name, model=model, stages=stages, data=data, rounds=OPEN_ROUNDS, wire=wire)


def _require_sound_texts(folder: Path, *, is_chat: bool) -> None:
    """Raise ValueError if files beside the tokenizer are damaged, or if its chat template fails."""
    tokenizer_files.require_sound(folder)
    if is_chat:
        template: ChatTemplate | None = chat.beside(str(folder), now=lambda: chat.TRAINING_DATE)
    else:
        template = chat.load(folder, now=lambda: chat.TRAINING_DATE)
    if template is None:
        return
    try:
        template.check()
    except ValueError as error:
        raise ValueError(
            f"{folder}: an ordinary conversation has no text: {error}; mend the chat template, or take it out"
        ) from None
    finally:
        template.close()


def with_weights(config: RunConfig, index: Index) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=index.digest))


def load_config(folder: Path) -> RunConfig:
    """The configuration of a run folder, with the tokenizer in that folder. Raises ValueError."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no run folder: make one with swarm-model import")
    config = configs.load(folder / CONFIG)
    _require_no_class(config)
    if not (folder / TOKENIZER).is_file():
        return config
    # The configuration may name another path, because the folder may have been moved or copied.
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(folder)))


def open_weights(folder: Path, config: RunConfig) -> Weights:
    """The weights of a run folder. Raises IntegrityError if they are not those that the run begins with."""
    found = weights.open_folder(folder / WEIGHTS)
    found.require(config.model.weights)
    return found


def to_toml(config: RunConfig) -> str:
    """A configuration as TOML: only the fields that differ from their defaults."""
    default = dataclasses.asdict(RunConfig())
    lines, sections = list[str](), list[str]()
    for name, value in dataclasses.asdict(config).items():
        if not isinstance(value, dict):
            lines += _line(name, value, default[name])
        else:
            entries = [line for key, entry in value.items() for line in _line(key, entry, default[name][key])]
            sections += ["", f"[{name}]", *entries] if entries else []
    return "\n".join([*lines, *sections]) + "\n"


def _line(name: str, value: Any, default: Any) -> list[str]:
    # JSON's scalars and arrays are TOML's as well.
    return [] if value == default else [f"{name} = {json.dumps(value)}"]
