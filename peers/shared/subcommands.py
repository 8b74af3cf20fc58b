"""A program of several commands: the first word chooses, and each has options of its own.

Used by swarm-keys and swarm-model.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peers.shared import cli, stopping
from peers.shared.exit_codes import EXIT_USAGE
from peers.shared.help_text import fitted

Command = tuple[type[Any], Callable[[Any], object]]
"""The options of one command of a program, and the function that runs it. Errors of the function are printed as one
line."""


def run(prog: str, about: str | None, commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    """Run the command that the first word names, and return the exit code.

    Args:
        about: what --help says of the program.
    """
    name, *arguments = argv or [""]
    if name in ("-h", "--help"):
        how = f"{prog} {'|'.join(commands)} --help explains the options."
        print(fitted(f"{about or ''}\n{how}"))
        return 0
    if name not in commands:
        said = f", not {name!r}" if argv else ""
        print(f"{prog}: error: give one of {', '.join(commands)}{said} (see {prog} --help)", file=sys.stderr)
        return EXIT_USAGE
    options, carry_out = commands[name]
    with stopping.interruptible():
        carry_out(cli.parse(options, prog=f"{prog} {name}", argv=arguments))
    return 0
