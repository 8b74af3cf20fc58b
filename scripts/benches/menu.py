"""The command line of scripts/bench, scripts/simulate and scripts/chaos: PROG [NAME] [--json] [options].

Progress goes to stderr, the figures to stdout: with --json one JSON object as the last line, otherwise a table. The
exit code is 1 if the figures say that the run has not `passed`, unless the module has an `exit_code(figures)`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from peers.shared import cli, logs, stopping
from peers.shared.process import EXIT_USAGE
from scripts.benches.shared.proc import Company


def run_named(
    prog: str, kind: str, known: Mapping[str, str], module_of: Callable[[str], ModuleType], *,
    is_about_speed: bool = False,
) -> int:  # fmt: skip
    """Run the module that the command line names, one of a `kind` (in the plural), and return the exit code."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in known:
        listed = ", ".join(f"{one} ({purpose})" for one, purpose in known.items())
        print(f"{prog}: error: name one of the {kind}: {listed}; {prog} NAME --help says more", file=sys.stderr)
        return EXIT_USAGE
    return run_module(f"{prog} {name}", module_of(name), arguments, is_about_speed=is_about_speed)


def run_module(prog: str, module: ModuleType, arguments: Sequence[str], *, is_about_speed: bool) -> int:
    """Run a module with these arguments, print its figures, and return the exit code. Figures about speed also get
    `others_cpu_share`."""
    options = cli.parse(module.Options, prog=prog, argv=arguments)
    logs.setup_logging(prog.rpartition("/")[2], "warning")
    others = Company()
    with stopping.interruptible():
        figures: dict[str, Any] = module.run(options)
    if is_about_speed:
        figures = {**figures, "others_cpu_share": others.share()}
    if options.json:
        print(json.dumps(figures))
    else:
        Console().print(_table(prog.rpartition("/")[2], figures))
    exit_code: Callable[[dict[str, Any]], int] = getattr(module, "exit_code", _exit_code)
    return exit_code(figures)


def _exit_code(figures: Mapping[str, Any]) -> int:
    # `passed` is None, or missing, if the bench has no goal to reach.
    return int(figures.get("passed") is False)


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    table = Table("figure", "value", title=name)
    for figure, value in _flatten(figures):
        table.add_row(figure, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def _flatten(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
            for number, entry in enumerate(value):
                yield from _flatten(entry, f"{prefix}{name}.{number}.")
        else:
            yield prefix + name, value
