"""The INVITE argument of programs. The option --initial-peers is the other way to say which run to enter.

Used by the options of every program that joins or looks at a run; it imports neither gRPC nor torch.
"""

from typing import Annotated, Protocol

import tyro

InviteOption = tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="[INVITE]")]]
"""swarm://..., perhaps followed by #TOKEN, or @FILE, where the file holds that; None if it is left out."""


class EntranceOptions(Protocol):
    """The options that say where, and with which token, a program enters a run."""

    @property
    def invite(self) -> str | None: ...
    @property
    def initial_peers(self) -> tuple[str, ...]: ...
    @property
    def token(self) -> str | None: ...
    @property
    def insecure(self) -> bool: ...


def joins(options: EntranceOptions) -> bool:
    """Whether the options name a run to join. Raises ValueError if they name it in both ways."""
    if options.invite is not None and options.initial_peers:
        raise ValueError("INVITE and --initial-peers both say which run to enter: leave one out")
    return options.invite is not None or bool(options.initial_peers)
