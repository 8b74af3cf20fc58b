"""Reads command lines into dataclasses, and makes command lines from them.

Each program has one frozen dataclass of options, with a docstring under each field as the option's help text.
"""

import contextlib
import dataclasses
import io
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from peers.shared.exit_codes import EXIT_USAGE
from peers.shared.help_text import Told, fitted_above_the_boxes
from peers.shared.invite_option import with_preset
from swarm.dht.addresses import free_port
from swarm.machine.words import counted
from swarm.types import LONGEST_NAME, NAME_PATTERN

Options = TypeVar("Options")

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"[-\u2500]{4,}")
_NAME = re.compile(r"^\W {5}(\S+)", re.MULTILINE)
"""Finds each argument in the box that tyro prints: the name of the option, or the name of the value if it is
positional."""
_PARSED = re.compile(r"Error parsing (\S+):")
_NO_TYPE = re.compile(r"Error parsing (\S+): no type matching (\S+) could be instantiated from \['(.*?)'\]")
_NO_NUMBER = re.compile(r"Error parsing (\S+): (invalid literal for int|could not convert string to float).*: '(.*)'")
_NO_CHOICE = re.compile(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)\.?", re.IGNORECASE)
_SIMILAR = ("Perhaps you meant", "Arguments similar to")
_EMPTY_PATH = "an empty path"
_FOLDERS_OR_NAMES = ("model", "base", "tokenizer", "dataset", "validation", "source")
"""Options that take a folder as well, and so are texts and no paths."""
_KINDS = {"INT": "a whole number", "FLOAT": "a number"}
MOST_THREADS = 1024
"""The largest value of --threads: more than any machine has cores."""
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff, tyro.conf.DisallowNone)


def parse(options: type[Options], *, prog: str, argv: Sequence[str]) -> Options:
    """Read `argv` into the dataclass. If an option is repeated, the last value is taken.

    Raises:
        SystemExit: code 0 after --help; code 2 after one line on stderr, also for a ValueError of `__post_init__`.
    """
    told, complaint = Told(sys.stdout), io.StringIO()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(complaint):
            read = tyro.cli(options, prog=prog, args=argv, config=_CONFIG, registry=_registry())
    except SystemExit as stop:
        if stop.code == EXIT_USAGE:
            _complain(prog, _one_line(complaint.getvalue(), options))
        else:
            print(fitted_above_the_boxes(told.getvalue()), end="")
        raise
    try:
        for name in _FOLDERS_OR_NAMES:
            value = getattr(read, name, None)
            if "" in (value if isinstance(value, tuple) else (value,)):
                raise ValueError(f"--{name} takes a path or a name, not ''")
        return with_preset(read)
    except ValueError as error:
        _complain(prog, str(error))
        raise SystemExit(EXIT_USAGE) from None


def _complain(prog: str, line: str) -> None:
    print(f"{prog}: error: {line} (see {prog} --help)", file=sys.stderr)


def _registry() -> ConstructorRegistry:
    """tyro's rules, changed so that --help shows fields as `_explained_briefly` makes them, and that an empty path is
    refused: it would be the current folder."""
    registry, is_asking = ConstructorRegistry(), False

    @registry.primitive_rule
    def path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
        if info.type is not Path:
            return None
        return PrimitiveConstructorSpec(
            nargs=1, metavar="PATH", instance_from_str=lambda words: _path(words[0]),
            is_instance=lambda value: isinstance(value, Path), str_from_instance=lambda value: [str(value)],
        )  # fmt: skip

    @registry.struct_rule
    def explained_briefly(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_asking
        if is_asking or not dataclasses.is_dataclass(info.type):
            return None
        # While `is_asking` is set, this rule returns None, so that tyro's own rule for dataclasses is used.
        is_asking = True
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, fields=tuple(map(_explained_briefly, spec.fields)))

    return registry


def _path(word: str) -> Path:
    if not word:
        raise ValueError(_EMPTY_PATH)
    return Path(word)


def _explained_briefly(field: StructFieldSpec) -> StructFieldSpec:
    """A field as --help shows it: its docstring without the source's line breaks, and no default that is empty."""

    def text() -> str | None:
        told = field.helptext() if callable(field.helptext) else field.helptext
        return None if told is None else " ".join(told.split())

    field_type: Any = field.type
    # For a repeated option, --help says "repeatable" where the default would be, so the hint stays.
    if field.default in (None, "", ()) and not _is_repeated(field_type):
        field_type = Annotated[field_type, tyro.conf.arg(help_behavior_hint="")]
    return dataclasses.replace(field, type=field_type, helptext=text)


def arguments(options: Any) -> list[str]:
    """The command line that `parse` reads into these options; an option with its default value is left out."""
    places: list[str] = []
    words: list[str] = []
    for field in dataclasses.fields(options):
        value, option = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(option)
        elif _marks(tyro.conf.Positional[str]) <= _marks(field.type):
            places += map(str, value if isinstance(value, tuple) else [value])
        elif isinstance(value, tuple) and _is_repeated(field.type):
            words += [word for one in value for word in (option, str(one))]
        elif isinstance(value, tuple):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return [*places, *words]


def spelled_out(text: str) -> str:
    """What an option or a variable says: the text itself, or for @FILE what the file holds.

    Raises:
        ValueError: the @ names no file.
        OSError: the file cannot be read.
    """
    if text == "@":
        raise ValueError("@ names no file: write @FILE")
    return Path(text[1:]).read_text(encoding="utf-8", errors="replace").strip() if text.startswith("@") else text


def _is_repeated(annotation: object) -> bool:
    """Whether the option is written before each of its values."""
    return _marks(tyro.conf.UseAppendAction[tuple[str, ...]]) <= _marks(annotation)


def _marks(annotation: object) -> set[Any]:
    """The metadata of an Annotated type; empty for another one."""
    return set(getattr(annotation, "__metadata__", ()))


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
    """Raise ValueError if what the option names is no folder."""
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
    """Raise ValueError if --wandb-online is given without --wandb."""
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


def _one_line(box: str, options: type[object]) -> str:
    """The part of tyro's box that says what is wrong; its borders depend on the terminal's encoding."""
    text = _TERMINAL_CODES.sub("", box).partition("\n")[2]
    lines = [line.strip("| \u2502") for line in text.splitlines()]
    sections = [section for section in _RULE.split(" ".join(lines)) if section.strip()]
    # tyro reports a mistyped option twice, as missing and as unrecognized. The second report says more.
    section = next((section for section in sections if "Unrecognized options" in section), sections[0])
    message = " ".join(section.split()).removeprefix(f"Error parsing {options.__name__}: ")
    if _EMPTY_PATH in message and (found := _PARSED.match(message)):
        return f"{found[1]} takes a path, not ''"
    if found := _NO_TYPE.match(message):
        option, types, value = found.groups()
        kinds = [_KINDS.get(name, name.strip("{}")) for name in types.split("|")]
        return f"{option} takes {' or '.join(kinds)}, not {value!r}"
    if found := _NO_NUMBER.match(message):
        option, kind, value = found.groups()
        return f"{option} takes {_KINDS['INT' if 'int' in kind else 'FLOAT']}, not {value!r}"
    if found := _NO_CHOICE.match(message):
        value, option, quoted = found.groups()
        choices = sorted(set(re.findall(r"'([^']*)'", quoted)) - {"None"})
        return f"{option} takes {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}"
    if message.startswith("Unrecognized options: ") and not message.split()[2].startswith("-"):
        return f"takes no such word: {message.partition(': ')[2]}"
    if message.startswith("Unrecognized options: ") and (similar := sorted(_explained(text, *_SIMILAR))):
        return f"{message[:1].lower()}{message[1:]}; did you mean {' or '.join(similar)}?"
    if message.startswith("Missing from"):
        return f"missing {', '.join(_explained(text, 'Missing from'))}"
    # The name of an option's value, such as INVITE, stays as it is.
    return message if message[1:2].isupper() else message[:1].lower() + message[1:]


def _explained(text: str, *headings: str) -> list[str]:
    """The arguments that tyro's box explains under one of these headings."""
    sections = [section for section in _RULE.split(text) if any(heading in section for heading in headings)]
    return list(dict.fromkeys(name for section in sections for name in _NAME.findall(section)))
