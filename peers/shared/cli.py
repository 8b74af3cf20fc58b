"""Command lines: read into dataclasses, made from them, and --help.

Each program, or each command of one, has a frozen dataclass of options; the docstring under a field is its help text.
"""

import contextlib
import dataclasses
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from peers.shared import stopping
from peers.shared.process import EXIT_USAGE
from peers.shared.run_options import with_preset

Options = TypeVar("Options")
Command = tuple[type[Any], Callable[[Any], object]]
"""The options of one command of a program, and the function that runs it. Errors of the function are printed as one
line."""

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"[-\u2500]{4,}")
_NAME = re.compile(r"^\W {5}(\S+)", re.MULTILINE)
"""Finds each argument in the box that tyro prints: the name of the option, or the name of the value if it is
positional."""
_PARSED = re.compile(r"Error parsing (\S+):")
_NO_TYPE = re.compile(r"Error parsing (\S+): no type matching (\S+) could be instantiated from \['(.*?)'\]")
_NO_NUMBER = re.compile(r"Error parsing (\S+): (invalid literal for int|could not convert string to float).*: '(.*)'")
_NO_CHOICE = re.compile(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)\.?", re.IGNORECASE)
_OF_SECTION = re.compile(r"Error parsing \w+: ([a-z]\w*) must ")
"""The ValueError of a dataclass within the options, which begins with a field's name."""
_SIMILAR = ("Perhaps you meant", "Arguments similar to")
_EMPTY_PATH = "an empty path"
_FOLDERS_OR_NAMES = ("model", "base", "tokenizer", "dataset", "validation", "source")
"""Options that take a folder as well, and so are texts and no paths."""
_KINDS = {"INT": "a whole number", "FLOAT": "a number"}
_MOST_COLUMNS = 120
"""The width of what --help says, in wider terminals."""
_BOX = re.compile(r"^(?:\x1b\[[0-9;]*m)*[ +\u256d]", re.MULTILINE)
"""Finds the first line of a box, or of what stands for one where only ASCII can be printed."""
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff, tyro.conf.DisallowNone)


def parse(options: type[Options], *, prog: str, argv: Sequence[str]) -> Options:
    """Read `argv` into the dataclass. If an option is repeated, the last value is taken.

    Raises:
        SystemExit: code 0 after --help; code 2 after one line on stderr, also for a ValueError of `__post_init__`.
    """
    told, complaint = _Told(sys.stdout), io.StringIO()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(complaint):
            read = tyro.cli(options, prog=prog, args=argv, config=_CONFIG, registry=_registry())
    except SystemExit as stop:
        if stop.code == EXIT_USAGE:
            _complain(prog, _one_line(complaint.getvalue(), options))
        else:
            print(_fitted_above_the_boxes(told.getvalue()), end="")
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


def run(prog: str, about: str | None, commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    """Run the command that the first word names, and return the exit code.

    Args:
        about: what --help says of the program.
    """
    name, *arguments = argv or [""]
    if name in ("-h", "--help"):
        how = f"{prog} {'|'.join(commands)} --help explains the options."
        print(_fitted(f"{about or ''}\n{how}"))
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
    return _marks(tyro.conf.UseAppendAction[tuple[str, ...]]) <= _marks(annotation)


def _marks(annotation: object) -> set[Any]:
    """The metadata of an Annotated type; empty for another one."""
    return set(getattr(annotation, "__metadata__", ()))


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
    if found := _OF_SECTION.match(message):
        return f"--{found[1].replace('_', '-')} must {message[found.end() :]}"
    if message.startswith("Unrecognized options: ") and not message.split()[2].startswith("-"):
        return f"takes no such word: {message.partition(': ')[2]}"
    if message.startswith("Unrecognized options: ") and (similar := sorted(_explained(text, *_SIMILAR))):
        return f"{message[:1].lower()}{message[1:]}; did you mean {' or '.join(similar)}?"
    if message.startswith("Missing from"):
        return f"missing {', '.join(_explained(text, 'Missing from'))}"
    # The name of an option's value, such as INVITE, stays as it is.
    return message if message[1:2].isupper() else message[:1].lower() + message[1:]


def _explained(text: str, *headings: str) -> list[str]:
    sections = [section for section in _RULE.split(text) if any(heading in section for heading in headings)]
    return list(dict.fromkeys(name for section in sections for name in _NAME.findall(section)))


class _Told(io.StringIO):
    """Takes what is printed for another stream, and looks like that one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a StringIO it is None
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()


def _fitted_above_the_boxes(text: str) -> str:
    """What --help says, of which tyro makes only the boxes as wide as the terminal."""
    found = _BOX.search(text)
    return text if found is None else f"{_fitted(text[: found.start()])}\n{text[found.start() :]}"


def _fitted(text: str) -> str:
    """The text with no line wider than the terminal. Paragraphs are filled; indented lines stay lines of their own."""
    width, lines = min(shutil.get_terminal_size().columns, _MOST_COLUMNS), list[str]()
    for line in text.splitlines():
        if line[:1].strip() and lines and lines[-1][:1].strip():
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(_filled(line, width) for line in lines)


def _filled(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line, width, subsequent_indent=f"{indent}    " if indent else "", break_long_words=False, break_on_hyphens=False
    )
