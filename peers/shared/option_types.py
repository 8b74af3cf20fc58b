"""What options take: types that refuse any other word as the command line is read, and say what would be right.

A type is the Python type with tyro's own specification of how it is read, which names neither option nor program. Last
come checks of several options together, and of what the machine has.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tyro.constructors import PrimitiveConstructorSpec

from swarm.dht.addresses import free_port
from swarm.machine.words import counted
from swarm.types import LARGEST_COUNT, LARGEST_STAGE, LONGEST_NAME, NAME_PATTERN

MOST = 10**9
"""The largest number of steps, samples, texts and the like: more than anybody waits for."""
_LONGEST_SHOWN = 60
"""Characters of a wrong word that its complaint shows."""


def whole(least: int = -(2**63), most: int = 2**63 - 1) -> PrimitiveConstructorSpec[Any]:
    bounds = " of 64 bits" if least == -(2**63) else f" from {least:,} to {most:,}"

    def read(word: str) -> int | None:
        value = int(word)
        return value if least <= value <= most else None

    return taking(f"a whole number{bounds}", "INT", read)


def number(
    least: float = -math.inf, most: float = math.inf, *, above: bool = False, below: bool = False
) -> PrimitiveConstructorSpec[Any]:
    """Finite numbers between two bounds, which are allowed, but for the lower one with `above` and the upper one with
    `below`."""
    begin, end = f"{'above' if above else 'from'} {least:,g}", f"{'below ' if below else ''}{most:,.9g}"
    bounds = f" {begin} {'and up ' if above else ''}to {end}" if most < math.inf else f", {least:,g} or more"
    bounds = bounds if least > -math.inf else ""

    def read(word: str) -> float | None:
        value = float(word)
        is_within = least <= value <= most and not (above and value == least) and not (below and value == most)
        return value if is_within and math.isfinite(value) else None

    return taking(f"a number{bounds}", "FLOAT", read)


def within(kind: type[int | float], least: float, most: float) -> PrimitiveConstructorSpec[Any]:
    return whole(int(max(least, -(2**63))), int(min(most, 2**63 - 1))) if kind is int else number(least, most)


def one_of(words: Sequence[str]) -> PrimitiveConstructorSpec[Any]:
    names = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    return taking(names, f"{{{','.join(words)}}}", {word: word for word in words}.get)


class Wrong(Exception):
    """Says what is wrong with a word, behind the name of its option. It is no ValueError, which tyro would put into
    words of its own."""


def taking(what: str, metavar: str, read: Callable[[str], Any]) -> PrimitiveConstructorSpec[Any]:
    """How an option of one word is read. `what` says what is right, in words. `read` gives the value of a word. If that
    is None, or a ValueError, the word is not right."""

    def value_of(words: list[str]) -> Any:
        value = None
        with contextlib.suppress(ValueError, OSError):
            value = read(words[0])
        if value is None:
            shown = words[0] if len(words[0]) <= _LONGEST_SHOWN else f"{words[0][:_LONGEST_SHOWN]}..."
            raise Wrong(f"takes {what}, not {shown!r}")
        return value

    return PrimitiveConstructorSpec(
        nargs=1, metavar=metavar, instance_from_str=value_of, is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )  # fmt: skip


def named(annotation: Any, option: str) -> Any:
    """The type of an option, of which every word that is wrong is told with the option's name; without one, by
    what a positional argument takes."""
    origin, (first, *others) = get_origin(annotation), get_args(annotation) or (None,)
    if origin is Annotated:
        specs = [mark for mark in annotation.__metadata__ if isinstance(mark, PrimitiveConstructorSpec)]
        marks = [mark for mark in annotation.__metadata__ if mark not in specs]
        told = [_naming(spec, option) for spec in specs]
        return Annotated[(first if specs else named(first, option), *marks, *told)]
    if origin in (Union, UnionType) and others == [NoneType]:
        # What tyro says of a wrong value for `X | None` is longer than for X.
        inherited: tuple[Any, ...] = getattr(named(first, option), "__metadata__", ())
        return Annotated[(annotation, *inherited)] if inherited else annotation
    if origin is tuple:
        return tuple[(named(first, option), *(one if one is ... else named(one, option) for one in others))]  # type: ignore[misc]
    if origin is Literal:
        return Annotated[annotation, _naming(one_of([first, *others]), option)]
    plain = _PLAIN_TYPES.get(annotation)
    return annotation if plain is None else Annotated[annotation, _naming(plain, option)]


def _naming(spec: PrimitiveConstructorSpec[Any], option: str) -> PrimitiveConstructorSpec[Any]:
    def read(words: list[str]) -> Any:
        try:
            return spec.instance_from_str(words)
        except Wrong as wrong:
            raise Wrong(f"{option or spec.metavar} {wrong}") from None

    return replace(spec, instance_from_str=read)


def _file(word: str) -> Path | None:
    if word and Path(word).is_dir():
        raise Wrong(f"takes a file, and {word} is a folder")
    return Path(word) if word else None


def _folder(word: str) -> Path | None:
    if Path(word).exists() and not Path(word).is_dir():
        raise Wrong(f"takes a folder, and {word} is none")
    return Path(word) if word else None


def _name(word: str) -> str | None:
    if len(word) > LONGEST_NAME:
        raise Wrong(f"takes at most {LONGEST_NAME} characters, not {len(word)}")
    return _text(word) if re.fullmatch(NAME_PATTERN, word) else None


def _size(word: str) -> int | None:
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?(?:([MGT])iB)?", word)
    if found is None:
        return None
    num_bytes = int(float(found[1]) * _UNITS[found[2]])
    # A few bytes are meant as something else.
    return num_bytes if num_bytes >= _UNITS["M"] else None


def _text(word: str) -> str:
    """Refuse a text in which Python put stand-ins for bytes of the command line that are not UTF-8."""
    try:
        word.encode()
    except UnicodeEncodeError as error:
        where = f"the byte 0x{ord(word[error.start]) & 0xFF:02x} after {counted(error.start, 'character')}"
        raise Wrong(f"takes UTF-8 text, and has {where}") from None
    return word


_UNITS = {None: 1, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
PATH = taking("a path", "PATH", lambda word: Path(word) if word else None)
"""An empty path would be the current folder."""
_PLAIN_TYPES = {int: whole(), float: number(), Path: PATH}
"""How words of these types are read where nothing else is said."""

Count = Annotated[int, whole(0, MOST)]
Positive = Annotated[int, whole(1, MOST)]
Tokens = Annotated[int, whole(0, LARGEST_COUNT)]
"""The tokens of a text, or any other number that goes into messages."""
Stages = Annotated[int, whole(1, LARGEST_STAGE + 1)]
Paths = Annotated[
    tuple[int, ...],
    taking(
        "a number of a path (0), or several (0,2)", "INT,INT...",
        lambda word: (
            tuple(sorted({int(number) for number in word.split(",")}))
            if re.fullmatch(r"\d{1,4}(,\d{1,4})*", word, re.ASCII)
            else None
        ),
    ),
]  # fmt: skip
LoraRank = Annotated[int, whole(0, 1 << 16)]
Port = Annotated[int, whole(0, 65535)]
"""0 takes a free one."""
Threads = Annotated[int, whole(0, 1024)]
"""More than any machine has cores. With many more PyTorch ends with a long traceback."""
Mebibytes = Annotated[int, whole(0, 1 << 30)]
Memory = Annotated[int, taking("a size such as 512MiB or 20GiB", "SIZE", _size)]
"""In bytes."""
Seed = Annotated[int, whole(0, 2**63 - 1)]
Seconds = Annotated[float, number(0, 10**6, above=True)]
File = Annotated[Path, taking("a path", "PATH", _file)]
"""It need not be there yet, and neither need a folder."""
Folder = Annotated[Path, taking("a path", "PATH", _folder)]
FolderOrName = Annotated[str, taking("a path or a name", "STR", lambda word: word or None)]
WandbProject = Annotated[
    str,
    taking(
        "a project's name of at most 128 characters, none of /\\#?%:", "STR",
        lambda word: word if word.strip() and len(word) <= 128 and not set(word) & set("/\\#?%:") else None,
    ),
]  # fmt: skip
Name = Annotated[str, taking("a name without control characters", "STR", _name)]
"""A peer's or a trainer's name, as announcements hold it."""
Text = Annotated[str, taking("text", "STR", _text)]


def as_typed(name: str) -> str:
    """The option of a field of this name, as it is typed."""
    return f"--{name.replace('_', '-')}"


def require_one(given: Mapping[str, bool]) -> None:
    """Raise ValueError unless just one of several ways, which have names, is given."""
    names, chosen = list(given), [name for name, is_given in given.items() if is_given]
    if len(chosen) != 1:
        not_all = f", not both {' and '.join(chosen)}" if len(chosen) == 2 else f", not {', '.join(chosen)}"
        raise ValueError(f"give one of {', '.join(names[:-1])} and {names[-1]}{not_all if chosen else ''}")


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


def require_distinct_ports(options: object, names: Iterable[str]) -> None:
    """Raise ValueError, which names both options, for a port that two of them name. None and 0 (any) are accepted."""
    taken = dict[int, str]()
    for name in names:
        value, option = getattr(options, name), as_typed(name)
        if value and taken.setdefault(value, option) != option:
            raise ValueError(f"{taken[value]} and {option} cannot both be {value}")


def require_free_port(option: str, host: str, port: int) -> None:
    """Raise ValueError, which names the option, if nothing can listen there: a server that starts later would find out
    only then."""
    try:
        free_port(host, port)
    except ValueError as error:
        raise ValueError(f"{option} {port}: {error}; choose another port") from None
