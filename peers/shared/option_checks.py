"""Checks of what a user gave for options: each raises a ValueError that names the option."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from swarm.dht.addresses import free_port
from swarm.machine.words import counted
from swarm.types import LONGEST_NAME, NAME_PATTERN

MOST_THREADS = 1024
"""The largest value of --threads: more than any machine has cores."""


def require_name(name: str) -> None:
    """Raise ValueError for a --name that no announcement can hold."""
    if len(name) > LONGEST_NAME:
        raise ValueError(f"--name must have at most {LONGEST_NAME} characters, not {len(name)}")
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ValueError(f"--name must have no control characters: not {name!r}")
    _require_utf8("name", name)


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


def require_kinds(options: object, *, files: Iterable[str] = (), folders: Iterable[str] = ()) -> None:
    """Raise ValueError, which names the option, for a folder in the place of a file, or the other way round.

    None (left out) and what does not exist are accepted.
    """
    for name in files:
        path: Path | None = getattr(options, name)
        if path is not None and path.is_dir():
            raise ValueError(f"--{name.replace('_', '-')} {path} is a folder: it takes a file")
    for name in folders:
        path = getattr(options, name)
        if path is not None and path.exists() and not path.is_dir():
            raise ValueError(f"--{name.replace('_', '-')} {path} is no folder")


def require_reporters(options: Any) -> None:
    if options.wandb_online and options.wandb is None:
        raise ValueError("--wandb-online needs --wandb PROJECT")


def require_threads(threads: int | None) -> None:
    """Raise ValueError for more --threads than PyTorch can start: it would end with a long traceback."""
    if threads is not None and not 0 <= threads <= MOST_THREADS:
        raise ValueError(f"--threads must be between 0 and {MOST_THREADS}, not {threads}")


def require_positive(options: object, names: Iterable[str]) -> None:
    """Raise ValueError, which names the option, for a number that is not positive and finite."""
    for name in names:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, not {value}")


def require_text(options: object, names: Iterable[str]) -> None:
    """Raise ValueError, which names the option, for a text or a tuple of texts not given in UTF-8."""
    for name in names:
        value = getattr(options, name)
        for text in value if isinstance(value, tuple) else (value or "",):
            _require_utf8(name, text)


def require_ports(options: object, names: Iterable[str]) -> None:
    """Raise ValueError, which names the options, for a number that is no TCP port, or that two options share.

    None (left out) and 0 (any free port) are accepted.
    """
    taken = dict[int, str]()
    for name in names:
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and not 0 <= value <= 65535:
            raise ValueError(f"{option} must be between 0 and 65535, not {value}")
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


def _require_utf8(name: str, text: str) -> None:
    """Raise ValueError for text in which Python put stand-ins for bytes of the command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"the byte 0x{ord(text[error.start]) & 0xFF:02x} after {counted(error.start, 'character')}"
        raise ValueError(f"--{name.replace('_', '-')} must be UTF-8 text, and has {where}") from None
