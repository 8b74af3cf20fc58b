"""Entry points of the commands. Each program is imported late, after its process has been prepared.

A program is a module in peers/ with `main(argv) -> exit code`.
"""

import sys
from importlib import import_module

from peers import process


def peer() -> None:
    """Run `swarm-peer`."""
    _run("swarm-peer", "peers.stage_peer")


def trainer() -> None:
    """Run `swarm-trainer`."""
    _run("swarm-trainer", "peers.trainer")


def status() -> None:
    """Run `swarm-status`."""
    _run("swarm-status", "peers.status")


def local() -> None:
    """Run `swarm-local`."""
    _run("swarm-local", "peers.local")


def keys() -> None:
    """Run `swarm-keys`."""
    _run("swarm-keys", "peers.keys")


def _run(prog: str, module: str) -> None:
    process.prepare_environment()
    process.keep_freed_memory()

    def main() -> int:
        exit_code: int = import_module(module).main(sys.argv[1:])
        return exit_code

    sys.exit(process.run_program(prog, main))
