"""The argument with which programs take an invite, beside --initial-peers, which leads to the same.

Used by the options of every program that joins or looks at a run; it imports neither gRPC nor torch.
"""

from typing import Annotated, Protocol

import tyro

InviteOption = tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="INVITE")]]
"""swarm://..., perhaps with #TOKEN behind it, or @FILE, a file that holds it; None if it is left out."""


class EntranceOptions(Protocol):
    """What options say of where a run is entered."""

    @property
    def invite(self) -> str | None: ...
    @property
    def initial_peers(self) -> tuple[str, ...]: ...
    @property
    def token(self) -> str | None: ...
    @property
    def insecure(self) -> bool: ...


def joins(options: EntranceOptions) -> bool:
    """Whether they name a run that is there already. Raises ValueError if they do so twice."""
    if options.invite is not None and options.initial_peers:
        raise ValueError("INVITE and --initial-peers are two ways to the same: leave one out")
    return options.invite is not None or bool(options.initial_peers)
