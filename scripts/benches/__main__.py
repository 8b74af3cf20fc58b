"""scripts/bench NAME [--json] [options]: run a bench and print its figures.

Progress goes to stderr; with --json the last line of stdout is one JSON object, else a table follows. A bench is a
module beside this one, with a class `Options` and a function `run(options) -> figures`.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.table import Table

from peers import cli, process

PROG = "scripts/bench"
BENCHES = {
    "parity": "a swarm follows the trajectory of one process",
    "exactly-once": "every microbatch counts once, whatever fails (slow)",
    "pipeline": "tokens/s of two stages, against what the cores can do",
    "peers": "tokens/s of two stages, against hivemind.moe and a static pipeline",
    "nanogpt": "nanoGPT's Shakespeare model as a swarm (slow)",
    "startup": "CPU and wall seconds until each command is of use",
    "hop": "activations there and gradients back, 8 MiB and 16 KiB, against hivemind.moe",
    "allreduce": "an averaging round of four processes, against hivemind's averager",
    "codecs": "size, error and speed of the codecs, against hivemind's and templar's format",
    "intruders": "what honest traffic keeps beside an intruder",
    "link": "throughput while a round is exchanged over slow links (slow)",
    "diloco": "validation loss and bytes of each way to average (slow)",
}


def main() -> int:
    """Run the bench that the command line names; gives the exit code."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in BENCHES:
        known = ", ".join(f"{bench} ({purpose})" for bench, purpose in BENCHES.items())
        print(f"{PROG}: error: name one of the benches: {known}; {PROG} NAME --help says more", file=sys.stderr)
        return process.EXIT_USAGE
    bench = import_module(f"scripts.benches.{name.replace('-', '_')}")
    options = cli.parse(bench.Options, prog=f"{PROG} {name}", argv=arguments)
    process.setup_logging(f"bench {name}", "warning")
    figures: dict[str, Any] = bench.run(options)
    if options.json:
        print(json.dumps(figures))
    else:
        Console().print(_table(name, figures))
    return 0


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


if __name__ == "__main__":
    process.prepare_environment()
    sys.exit(process.run_program(PROG, main))
