"""The options that say which run a program enters, and with which token, or with which settings it begins one.

Used by the options of every program that joins or looks at a run; it imports neither gRPC nor torch.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import tyro

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
class RunOptions:
    """The options with which a program enters one run; those of programs extend these."""

    invite: InviteOption = None
    """The invite to the run, swarm://..., as every swarm-peer prints it."""
    lan: bool = False
    """Instead of an INVITE: the run that a peer announces in this network with --lan. Needs the extra lan."""
    initial_peers: tuple[str, ...] = ()
    """DHT addresses of the run's peers, instead of an invite."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with the invite (INVITE#TOKEN), with an address
    (ADDRESS#TOKEN), or in SWARM_TOKEN."""
    insecure: bool = False
    """Join a run whose peers were started with --insecure."""


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

    given: Any = options
    preset = configs.read_preset(given.preset)
    named = getattr(given, "dataset", True) or any(setting.startswith("data.dataset=") for setting in given.set)
    if preset.needs_text and not named:
        raise ValueError(f"--preset {preset.name} needs {preset.needs_text}")
    if not preset.begins_with:
        if given.model is not None:
            raise ValueError(f"--preset {preset.name} and --model exclude each other")
        return options
    model = given.model or preset.begins_with
    begun: Options = dataclasses.replace(given, preset=None, model=model, set=(*preset.settings, *given.set))
    return begun
