"""Checks of what a user gave for options: each raises a ValueError that names the option."""

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from swarm.dht.addresses import free_port


def require_one(given: Mapping[str, bool]) -> None:
    """Raise ValueError unless just one of several ways is given.

    Args:
        given: the name of each way, and whether it was given.
    """
    names, chosen = list(given), [name for name, is_given in given.items() if is_given]
    if len(chosen) != 1:
        not_all = f", not both {' and '.join(chosen)}" if len(chosen) == 2 else f", not {', '.join(chosen)}"
        raise ValueError(f"give one of {', '.join(names[:-1])} and {names[-1]}{not_all if chosen else ''}")


def require_at_least(options: object, least: Mapping[str, int]) -> None:
    """Raise ValueError, which names the option, for a number below its bound; None (left out) is accepted."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}, not {value}")


def require_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{option} {folder}: there is no such folder")


def require_own_host(option: str, host: str) -> None:
    """Raise ValueError, which names the option, if no process can listen at this host; an empty one is accepted."""
    try:
        if host:
            free_port(host, 0)
    except ValueError as error:
        raise ValueError(f"{option} {host} is no IP address of this machine: {error}") from None


def require_reporters(options: Any) -> None:
    if options.wandb_online and options.wandb is None:
        raise ValueError("--wandb-online needs --wandb PROJECT")


def require_positive(options: object, names: Iterable[str]) -> None:
    """Raise ValueError, which names the option, for a number that is not positive and finite."""
    for name in names:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, not {value}")


def require_distinct_ports(options: object, names: Iterable[str]) -> None:
    """Raise ValueError, which names both options, for a port that two of them name. None and 0 (any) are accepted."""
    taken = dict[int, str]()
    for name in names:
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value and taken.setdefault(value, option) != option:
            raise ValueError(f"{taken[value]} and {option} cannot both be {value}")


def require_free_port(option: str, host: str, port: int) -> None:
    """Raise ValueError, which names the option, if nothing can listen there: a server that starts later would find out
    only then."""
    try:
        free_port(host, port)
    except ValueError as error:
        raise ValueError(f"{option} {port}: {error}; choose another port") from None


def require_distinct(options: object, names: Iterable[str]) -> None:
    """Raise ValueError for an option that lists nothing, or something twice."""
    for name in names:
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"--{name.replace('_', '-')} must name at least one, and none twice")


def require_known(options: object, name: str, known: Collection[str], *, at_least: int = 1) -> None:
    """Raise ValueError for an option that lists a name that is none of the known ones, or lists too few."""
    option, values = f"--{name.replace('_', '-')}", getattr(options, name)
    if unknown := [value for value in values if value not in known]:
        raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    if len(values) < at_least:
        raise ValueError(f"{option} needs at least one name")
