"""The options that say which run a program enters, or with which settings it begins one, and the fields that these set.

This imports neither gRPC nor torch.
"""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

import tyro

from peers.shared import option_types as takes
from swarm.checkpoint.keeping import Keeping
from swarm.errors import CorpusMismatch

if TYPE_CHECKING:
    from swarm.config import RunConfig

Options = TypeVar("Options")

InviteOption = tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="[INVITE]")]]
"""swarm://..., perhaps followed by #TOKEN, or @FILE, where the file holds that; None if it is left out."""
SettingsOption = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(
        metavar="SECTION.KEY=VALUE",
        help="Any other setting of a new run, such as optimizer.learning_rate=1e-4; may be given several times. The "
        "page docs/configuration.md lists all.",
    ),
]
"""The type of --set."""
FIELDS = {
    "dataset": "data.dataset",
    "validation": "data.validation",
    "tokenizer": "data.tokenizer",
    "max_tokens": "data.max_tokens",
    "stages": "stages.num_stages",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_targets": "lora.targets",
}
"""The field of the configuration that each option sets. Options have the names of the fields of their dataclass."""


class EntranceOptions(Protocol):
    """A dataclass of options that say where, and with which token, a program enters a run."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def invite(self) -> str | None: ...
    @property
    def lan(self) -> bool: ...
    @property
    def initial_peers(self) -> tuple[str, ...]: ...
    @property
    def token(self) -> str | None: ...
    @property
    def insecure(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class WayOptions:
    """The options that say how runs are found, and with which token they are entered."""

    lan: bool = False
    """Instead of an INVITE: the run that a peer announces in this network with --lan. Needs the extra lan."""
    initial_peers: tuple[str, ...] = ()
    """DHT addresses of the run's peers, instead of an invite."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with the invite (INVITE#TOKEN), with an address
    (ADDRESS#TOKEN), or in SWARM_TOKEN."""
    insecure: bool = False
    """For runs whose peers were started with --insecure."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(WayOptions):
    """The options with which a program enters one run; those of programs extend these."""

    invite: InviteOption = None
    """The invite to the run, swarm://..., as every swarm-peer prints it."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options that name the text and the tokenizer of a new run."""

    dataset: tyro.conf.UseAppendAction[tuple[takes.FolderOrName, ...]] = ()
    """Text of a new run, instead of the configuration's: stdlib, a file, a folder, a glob, hf:NAME, or dummy. Given
    several times, each dataset has a held-out loss of its own."""
    validation: takes.FolderOrName | None = None
    """Text for evaluations, named as in --dataset, of which then nothing is held out."""
    tokenizer: takes.FolderOrName | None = None
    """Tokenizer of a new run, instead of the configuration's: bytes, a folder with a tokenizer.json, the path of one,
    the name of a model on the hub, or class:MODULE:CLASS."""
    max_tokens: takes.Tokens | None = None
    """Tokens of each dataset of a new run, at most; left out, it is what the configuration says, and usually all."""


@dataclass(frozen=True, kw_only=True)
class ReportingOptions:
    """The options that say where a program that trains reports its figures."""

    wandb: takes.WandbProject | None = None
    """Report to this Weights & Biases project, into local files."""
    wandb_online: bool = False
    """Report to the Weights & Biases service as it happens."""
    tensorboard: takes.Folder | None = None
    """Write figures for TensorBoard into this folder. Needs the extra tensorboard."""

    def __post_init__(self) -> None:
        if self.wandb_online and self.wandb is None:
            raise ValueError("--wandb-online needs --wandb PROJECT")


@dataclass(frozen=True, kw_only=True)
class KeepingOptions:
    """The options that say where checkpoints are and how many stay, of which swarm-doctor checks the room."""

    checkpoint: takes.Folder | None = None
    """Folder for checkpoints; left out, none is written."""
    keep_checkpoints: Annotated[
        takes.Positive | None,
        tyro.conf.arg(help=f"Checkpoints to keep, {Keeping.keep} if left out; older ones are deleted."),
    ] = None

    @property
    def keeping(self) -> Keeping:
        return Keeping(keep=self.keep_checkpoints or Keeping.keep)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(KeepingOptions):
    """The options that say which checkpoints a program writes, and from which one it goes on."""

    checkpoint_every: Annotated[
        takes.Positive | None,
        tyro.conf.arg(
            help=f"Rounds, which are steps, from one checkpoint to the next, {Keeping.every} if left out; the same at "
            "all peers, so that all stages have the same rounds."
        ),
    ] = None
    resume: takes.Folder | None = None
    """Go on from the newest checkpoint in this folder."""

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) is not None and self.checkpoint is None:
                raise ValueError(f"{takes.as_typed(name)} needs --checkpoint DIR: without it nothing is written")

    @property
    def keeping(self) -> Keeping:
        return dataclasses.replace(super().keeping, every=self.checkpoint_every or Keeping.every)


def joins(options: EntranceOptions) -> bool:
    """Whether the options name a run to join. Raises ValueError if they name it in both ways."""
    if options.invite is not None and options.initial_peers:
        raise ValueError("INVITE and --initial-peers both say which run to enter: leave one out")
    return options.invite is not None or bool(options.initial_peers)


def with_preset(options: Options) -> Options:
    """The options with the model and the settings of a preset that begins with a model. Raises ValueError for a preset
    that is not known, and for what it needs besides."""
    if getattr(options, "preset", None) is None:
        return options
    # This import takes a while, and most programs have no presets.
    from swarm import config as configs
    from swarm.config.data import WELL_KNOWN

    given: Any = options
    preset = configs.read_preset(given.preset)
    named = getattr(given, "dataset", True) or any(setting.startswith("data.dataset=") for setting in given.set)
    if preset.needs_text and not named:
        raise ValueError(f"--preset {preset.name} needs {preset.needs_text}; {WELL_KNOWN}")
    if not preset.begins_with:
        if given.model is not None:
            raise ValueError(f"--preset {preset.name} and --model exclude each other")
        return options
    model = given.model or preset.begins_with
    begun: Options = dataclasses.replace(given, preset=None, model=model, set=(*preset.settings, *given.set))
    return begun


def named_config(options: Any, of_model: "RunConfig | None" = None, *, preset: str | None) -> "RunConfig":
    """The configuration of a new run: that of --config, of the model that --model names, or of a preset, with the text,
    the settings and the number of stages that other options name. Raises ValueError, and OSError."""
    from swarm import config as configs

    config = configs.load(options.config) if options.config else of_model or configs.load_preset(preset or "")
    named = {name: getattr(options, name, None) for name in ("dataset", "validation", "tokenizer", "max_tokens")}
    given: dict[str, Any] = {name: value for name, value in named.items() if value not in (None, ())}
    # --set data.format=chat is checked against the dataset, so that comes first.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **given))
    config = configs.with_settings(config, options.set)
    if (num_stages := getattr(options, "stages", None)) is None:
        return config
    stages = dataclasses.replace(config.stages, num_stages=num_stages, layers_per_stage=())
    return dataclasses.replace(config, stages=stages)


def begun(config: "RunConfig", num_steps: int | None, cache: Path) -> "RunConfig":
    """The configuration with which a run begins on its text, which is prepared where sizes are left out. May block.
    `num_steps` are the steps that the run is planned for, if that is known. Raises ValueError if there is no such text
    or tokenizer."""
    if not config.lacks_sizes:
        return config.begun(num_steps)
    from swarm.data import corpora, tokenizers

    tokenizers.load_for_run(config.data, vocab_size=config.model.vocab_size)
    # Documents are packed as if there were plenty of text.
    text = corpora.size(config.begun().data, cache_dir=cache / "corpora")
    return config.begun(num_steps, text)


@contextmanager
def naming_options(options: object) -> Iterator[None]:
    """In each ValueError and CorpusMismatch that the block raises, replace the fields in FIELDS by the options that set
    them, if these are given."""
    given = {
        field: takes.as_typed(name) for name, field in FIELDS.items() if getattr(options, name, None) not in (None, ())
    }
    try:
        yield
    except (ValueError, CorpusMismatch) as error:
        text = renamed(str(error), given)
        if text == str(error):
            raise
        # `with_settings` names --set, though another option has the value.
        text = text.removeprefix("--set: ") if text.startswith("--set: --") else text
        raise (CorpusMismatch if isinstance(error, CorpusMismatch) else ValueError)(text) from error


def renamed(text: str, given: dict[str, str]) -> str:
    """The text with other names for fields. A name in quotes, or one that is part of a longer name, stays as it is."""
    for field, option in given.items():
        text = re.sub(rf"(?<![\w.'\"/-]){re.escape(field)}(?!\.?\w)", option, text)
    return text
