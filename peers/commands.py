"""Entry points of the commands, and the command lines with which other processes start them.

A program is a module in peers/ with `main(argv) -> exit code`. It is imported late, after its process has been
prepared. While it is being imported, Ctrl-C ends the process at once. The handler for this is set here, so this module
itself imports nothing that takes long.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import FrameType, ModuleType

LEAST_BYTES = 1000 << 20
"""Bytes of address space that a stage peer needs to serve the smallest stage on a CPU. Most of it is for libraries'
code and threads' stacks."""
SLOW_SECONDS = 2.0
"""When libraries have been loading for this long, a line on the terminal says so."""


def command_line(program: str, arguments: Iterable[str]) -> list[str]:
    """The command line that runs one of the programs below in a new process. `cli.arguments` makes the arguments. With
    -P, Python does not import modules of the same name from the current folder."""
    return [sys.executable, "-P", "-c", f"from peers.commands import {program}; {program}()", *arguments]


def _run(prog: str, module: str, options: tuple[str, str] | None = None, address_bytes: int = 0) -> None:
    """Run a program, and then end the process.

    Args:
        options: module and name of the program's options, or of a function that explains them. Given where that module
            is imported much faster than the program, so that --help and mistyped options are answered at once.
        address_bytes: the address space that the program needs.
    """
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, _end)
    from peers.shared import cli, process, stopping  # This takes a while, so the handler above comes first.

    process.prepare_environment()
    process.keep_freed_memory()
    process.allow_open_files()

    def main() -> int:
        if options is not None:
            options_module, name = options
            explained = getattr(import_module(options_module), name)
            if isinstance(explained, type):
                cli.parse(explained, prog=prog, argv=sys.argv[1:])
            else:
                explained(sys.argv[1:])
        process.read_dotenv()
        process.require_addresses(address_bytes)
        with said_if_slow(prog):
            program = load(module)
        try:
            if is_interruptible:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            exit_code: int = program.main(sys.argv[1:])
        finally:
            if is_interruptible:
                signal.signal(signal.SIGINT, _end)
        return exit_code

    sys.exit(stopping.run_program(prog, main))


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once, while it has nothing to clean up. A KeyboardInterrupt in the middle of an import would
    leave libraries half imported, which can raise any error later."""
    os._exit(128 + number)


@contextmanager
def said_if_slow(prog: str) -> Iterator[None]:
    """If the block takes long and stderr is a terminal, print a line that says that libraries are being loaded."""
    line = threading.Timer(SLOW_SECONDS, print, [f"{prog}: loading its libraries ..."], {"file": sys.stderr})
    line.daemon = True
    if sys.stderr.isatty():
        line.start()
    try:
        yield
    finally:
        line.cancel()


def load(module: str) -> ModuleType:
    """Import a program, and exclude the imported objects from cyclic garbage collection. Imported modules stay until
    the process ends. Without this, the collector would examine them again and again, during the import and later, and
    each time stop every thread for about 0.1 s."""
    gc.disable()
    try:
        program = import_module(module)
        gc.freeze()
    finally:
        gc.enable()
    return program


peer = partial(_run, "swarm-peer", "peers.stage_peer.program", ("peers.stage_peer.options", "PeerOptions"), LEAST_BYTES)
trainer = partial(
    _run, "swarm-trainer", "peers.trainer.program", ("peers.trainer.options", "TrainerOptions"), LEAST_BYTES
)
status = partial(_run, "swarm-status", "peers.status.program")
local = partial(_run, "swarm-local", "peers.local.program")
keys = partial(_run, "swarm-keys", "peers.keys")
meet = partial(_run, "swarm-meet", "peers.meet")
model = partial(_run, "swarm-model", "peers.model.program", ("peers.model.options", "explain"))
generate = partial(_run, "swarm-generate", "peers.generate.program", ("peers.generate.options", "GenerateOptions"))
doctor = partial(_run, "swarm-doctor", "peers.doctor.program", ("peers.doctor.options", "DoctorOptions"))
dashboard = partial(_run, "swarm-dashboard", "peers.dashboard.program")


def static() -> None:
    """Run `swarm-static`."""
    # The threads that compute one operator wait for each other. By default libgomp makes them wait in a busy loop.
    # Where several processes share the cores, a waiting thread would then occupy a core that another thread needs, and
    # steps would take several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _run("swarm-static", "peers.static.program", ("peers.static.options", "explain"))
