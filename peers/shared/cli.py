"""Command lines: read into dataclasses, made from them, and --help.

Each program, or each command of one, has a frozen dataclass of options; the docstring under a field is its help text.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from peers.shared import option_types, stopping
from peers.shared.process import EXIT_USAGE
from peers.shared.run_options import with_preset

Options = TypeVar("Options")
Command = tuple[type[Any], Callable[[Any], object]]
"""The options of one command of a program, and the function that runs it. Errors of the function are printed as one
line."""

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"[-\u2500]{4,}")
_NAME = re.compile(r"^\W {5}(\S+)", re.MULTILINE)
"""Finds each argument that tyro's box says is missing: the name of the option, or the name of the value if it is
positional."""
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff, tyro.conf.DisallowNone)


def parse(options: type[Options], *, prog: str, argv: Sequence[str]) -> Options:
    """Read `argv` into the dataclass. If an option is repeated, the last value is taken. Raises SystemExit with code 0
    after --help, and with code 2 after one line on stderr, also for a ValueError of `__post_init__`."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            read = tyro.cli(options, prog=prog, args=argv, config=_CONFIG, registry=_registry())
        return with_preset(read)
    except (option_types.Wrong, ValueError) as error:
        _complain(prog, str(error))
        raise SystemExit(EXIT_USAGE) from None
    except SystemExit as stop:
        if stop.code == EXIT_USAGE:
            _complain(prog, _one_line(complaint.getvalue(), options))
        raise


def run(prog: str, about: str | None, commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    """Run the command that the first word names, and return the exit code. --help says `about` of the program."""
    name, *arguments = argv or [""]
    if name in ("-h", "--help"):
        print(f"{about or ''}\n{prog} {'|'.join(commands)} --help explains the options.")
        return 0
    if name not in commands:
        said = f", not {name!r}" if argv else ""
        print(f"{prog}: error: give one of {', '.join(commands)}{said} (see {prog} --help)", file=sys.stderr)
        return EXIT_USAGE
    options, carry_out = commands[name]
    with stopping.interruptible():
        carry_out(parse(options, prog=f"{prog} {name}", argv=arguments))
    return 0


def _complain(prog: str, line: str) -> None:
    print(f"{prog}: error: {line} (see {prog} --help)", file=sys.stderr)


def _registry() -> ConstructorRegistry:
    """tyro's rules, changed so that --help shows fields as `_explained_briefly` makes them, and that what is wrong with
    values is raised as it is. Numbers of a dataclass within the options may have `least` and `most` as metadata."""
    registry, is_asking = ConstructorRegistry(), False

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

        @functools.wraps(spec.instantiate)
        def instantiate(**values: Any) -> Any:
            try:
                return spec.instantiate(**values)
            except ValueError as error:
                raise option_types.Wrong(str(error)) from error

        limits = {field.name: dict(field.metadata) for field in dataclasses.fields(info.type) if field.metadata}
        # A program's own options come first, and then those that it shares with others.
        own = inspect.get_annotations(info.type)
        ordered = sorted(spec.fields, key=lambda field: field.name not in own)
        fields = tuple(_explained_briefly(field, limits.get(field.name)) for field in ordered)
        return dataclasses.replace(spec, instantiate=instantiate, fields=fields)

    return registry


def _explained_briefly(field: StructFieldSpec, limits: Mapping[str, float] | None) -> StructFieldSpec:
    """A field as --help shows it: its docstring without the source's line breaks, and no default that is empty."""

    def text() -> str | None:
        told = field.helptext() if callable(field.helptext) else field.helptext
        return None if told is None else " ".join(told.split())

    field_type: Any = field.type
    if limits is not None:
        field_type = Annotated[field_type, option_types.within(field_type, **limits)]
    is_positional = _marks(tyro.conf.Positional[str]) <= _marks(field.type)
    field_type = option_types.named(field_type, "" if is_positional else option_types.as_typed(field.name))
    # For a repeated option, --help says "repeatable" where the default would be, so the hint stays.
    if field.default in (None, "", ()) and not _is_repeated(field_type):
        field_type = Annotated[field_type, tyro.conf.arg(help_behavior_hint="")]
    return dataclasses.replace(field, type=field_type, helptext=text)


def arguments(options: Any) -> list[str]:
    """The command line that `parse` reads into these options; an option with its default value is left out."""
    places: list[str] = []
    words: list[str] = []
    for field in dataclasses.fields(options):
        value, option = getattr(options, field.name), option_types.as_typed(field.name)
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
    """What an option or a variable says: the text itself, or for @FILE what the file holds. Raises ValueError if the @
    names no file, and OSError if the file cannot be read."""
    if text == "@":
        raise ValueError("@ names no file: write @FILE")
    return Path(text[1:]).read_text(encoding="utf-8", errors="replace").strip() if text.startswith("@") else text


def _is_repeated(annotation: object) -> bool:
    return _marks(tyro.conf.UseAppendAction[tuple[str, ...]]) <= _marks(annotation)


def _marks(annotation: object) -> set[Any]:
    """The metadata of an Annotated type; empty for another one."""
    return set(getattr(annotation, "__metadata__", ()))


def _one_line(box: str, options: type[object]) -> str:
    """What tyro's box says first; its borders depend on the terminal's encoding."""
    text = _TERMINAL_CODES.sub("", box).partition("\n")[2]
    lines = [line.strip("| \u2502") for line in text.splitlines()]
    sections = [" ".join(section.split()) for section in _RULE.split(" ".join(lines)) if section.strip()]
    # tyro reports a mistyped option twice, as missing and as unrecognized. The second report says more.
    message = next((section for section in sections if section.startswith("Unrecognized options")), sections[0])
    if message.startswith("Missing from"):
        names = _NAME.findall(_RULE.split(text)[1])
        return f"missing {', '.join(names)}"
    if message.startswith("Unrecognized options"):
        words = message.partition(": ")[2]
        if not words.startswith("-"):
            return f"takes no such word: {words}"
        known = list(_names(options))
        typed = [word for word in words.replace(",", " ").split() if word.startswith("--")]
        similar = [name for word in typed for name in difflib.get_close_matches(word, known, n=1, cutoff=0.8)]
        return f"unrecognized options: {words}" + (f"; did you mean {' or '.join(similar)}?" if similar else "")
    # The name of an option's value, such as INVITE, stays as it is.
    return message if message[1:2].isupper() else message[:1].lower() + message[1:]


def _names(options: type[object]) -> Iterator[str]:
    for name, annotation in get_type_hints(options).items():
        is_section = dataclasses.is_dataclass(annotation)
        yield from _names(annotation) if is_section else [option_types.as_typed(name)]
