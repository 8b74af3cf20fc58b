"""The options that say which run a program enters, and with which token: INVITE, --lan or --initial-peers.

Used by the options of every program that joins or looks at a run; it imports neither gRPC nor torch.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import tyro

InviteOption = tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="[INVITE]")]]
"""swarm://..., perhaps followed by #TOKEN, or @FILE, where the file holds that; None if it is left out."""


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
