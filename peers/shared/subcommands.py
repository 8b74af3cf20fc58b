"""A program of several commands: the first word chooses, and each has options of its own.

Used by swarm-keys and swarm-model.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from peers.shared import cli, process

Options = TypeVar("Options")


@dataclass(frozen=True)
class Command(Generic[Options]):
    """One command of a program.

    Attributes:
        options: read from its command line.
        run: carries the command out. It raises what the program prints as one line.
    """

    options: type[Options]
    run: Callable[[Options], object]


def run(prog: str, about: str | None, commands: Mapping[str, Command[Any]], argv: Sequence[str]) -> int:
    """Run the command that the first word names; gives the exit code.

    Args:
        about: what --help says of the program.
    """
    name, *arguments = argv or [""]
    if name in ("-h", "--help"):
        print(f"{about}\n{prog} {'|'.join(commands)} --help explains the options.")
        return 0
    if name not in commands:
        said = f", not {name!r}" if argv else ""
        print(f"{prog}: error: give one of {', '.join(commands)}{said} (see {prog} --help)", file=sys.stderr)
        return process.EXIT_USAGE
    command = commands[name]
    with process.interruptible():
        command.run(cli.parse(command.options, prog=f"{prog} {name}", argv=arguments))
    return 0
