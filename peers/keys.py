"""swarm-keys: makes a run's owner key, and the tokens with which others join it.

    swarm-keys new owner.pem
    swarm-keys issue owner.pem --role peer --expires 30d
    swarm-keys show TOKEN

Works on files alone: it needs no swarm and no network. Whoever has the owner's key file decides who may join.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from peers.shared import cli
from peers.shared.cli import Command
from peers.shared.option_types import one_of
from peers.shared.token_option import read_token
from swarm.credentials.identity import OwnerKey, new_owner
from swarm.credentials.rights import Role

PROG = "swarm-keys"
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Make an owner's key: whoever has the file may let others into the runs that are begun with it."""

    file: tyro.conf.Positional[Path]
    """File to make; only this user can read it."""


@dataclass(frozen=True, kw_only=True)
class IssueOptions:
    """Print a token: whoever has it can join until it expires, with any number of processes."""

    file: tyro.conf.Positional[Path]
    """The owner's key file."""
    role: Annotated[Role, one_of(tuple(Role)), tyro.conf.arg(help=" ".join(f"{role}: {role.may}." for role in Role))]
    expires: str = "30d"
    """How long it holds: a number of days (30d), hours (12h) or minutes (45m)."""
    name: str = "token"
    """What to call it, for `swarm-keys show`."""

    def __post_init__(self) -> None:
        number, unit = self.expires[:-1], self.expires[-1:]
        if not (number.isascii() and number.isdigit() and 0 < int(number) < 10**6 and unit in _UNITS):
            raise ValueError(f"--expires takes a number and d, h or m (30d, 12h, 45m), not {self.expires!r}")

    @property
    def lifetime(self) -> datetime.timedelta:
        return datetime.timedelta(**{_UNITS[self.expires[-1]]: int(self.expires[:-1])})


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Say what a token is."""

    token: tyro.conf.Positional[str]
    """The token, or @FILE."""


def main(argv: Sequence[str]) -> int:
    return cli.run(PROG, __doc__, _COMMANDS, argv)


def new(options: NewOptions) -> None:
    """Make an owner's key."""
    owner = new_owner(_now())
    owner.save(options.file)
    print(f"{options.file}: the key of owner {owner.authority.fingerprint}")
    print(f"  a token: {PROG} issue {options.file} --role peer")


def issue(options: IssueOptions) -> None:
    owner = OwnerKey.load(options.file)
    print(owner.issue(options.role, name=options.name, now=_now(), lifetime=options.lifetime))


def show(options: ShowOptions) -> None:
    """Say what a token is."""
    token = read_token(options.token)
    expires = datetime.datetime.fromtimestamp(token.expires_at, datetime.UTC)
    state = "holds until" if expires > _now() else "expired on"
    print(f"{token.name}: a {token.role}'s token of owner {token.authority.fingerprint}")
    print(f"  {state} {expires:%Y-%m-%d %H:%M} UTC")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


_COMMANDS: dict[str, Command] = {"new": (NewOptions, new), "issue": (IssueOptions, issue), "show": (ShowOptions, show)}
