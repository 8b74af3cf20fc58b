"""Entry points of the commands, and the command lines with which other processes start them.

Each program is imported late, after its process has been prepared. A program is a module in peers/ with
`main(argv) -> exit code`. Until a program has been imported, Ctrl-C ends the process on the spot. That works only once
this module has been imported, so its own imports take next to no time.
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
"""Bytes of address space that a stage peer takes until it serves the smallest stage on a CPU, most of it for libraries'
code and threads' stacks."""
SLOW_SECONDS = 2.0
"""Once libraries have been loading for this long, somebody who watches is told."""


def command_line(program: str, arguments: Iterable[str]) -> list[str]:
    """The command line of another process that runs one of the programs below; see cli.arguments for the arguments.

    Because of -P, modules that happen to lie in the current folder are not imported instead of ours.
    """
    return [sys.executable, "-P", "-c", f"from peers.commands import {program}; {program}()", *arguments]


def _run(prog: str, module: str, options: tuple[str, str] | None = None, address_bytes: int = 0) -> None:
    """Run a program, and end the process.

    Args:
        options: module and name of its options, or of a function that explains them, if that module is imported much
            faster than the program: --help and a mistyped line are then answered at once.
        address_bytes: the address space that it takes.
    """
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, _end)
    from peers.shared import cli, env_file, faults, process  # This takes a while, so the handler above comes first.

    process.prepare_environment()
    process.keep_freed_memory()

    def main() -> int:
        if options is not None:
            options_module, name = options
            explained = getattr(import_module(options_module), name)
            if isinstance(explained, type):
                cli.parse(explained, prog=prog, argv=sys.argv[1:])
            else:
                explained(sys.argv[1:])
        env_file.read()
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

    sys.exit(faults.run_program(prog, main))


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once, while it has nothing to clean up.

    A KeyboardInterrupt in the middle of an import would leave libraries half imported, which can raise any error later.
    """
    os._exit(128 + number)


@contextmanager
def said_if_slow(prog: str) -> Iterator[None]:
    """Say, if the block takes long and stderr is a terminal, that the program's libraries are being loaded."""
    line = threading.Timer(SLOW_SECONDS, print, [f"{prog}: loading its libraries ..."], {"file": sys.stderr})
    line.daemon = True
    if sys.stderr.isatty():
        line.start()
    try:
        yield
    finally:
        line.cancel()


def load(module: str) -> ModuleType:
    """Import a program, and exempt what it imports from the garbage collector of cycles.

    Imported modules stay until the process ends. The collector would look through them again and again, during the
    import and later, and hold up every thread for some 0.1 s each time.
    """
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
model = partial(_run, "swarm-model", "peers.model.program", ("peers.model.options", "explain"))
generate = partial(_run, "swarm-generate", "peers.generate.program", ("peers.generate.options", "GenerateOptions"))
doctor = partial(_run, "swarm-doctor", "peers.doctor.program", ("peers.doctor.options", "DoctorOptions"))
dashboard = partial(_run, "swarm-dashboard", "peers.dashboard.program")


def static() -> None:
    """Run `swarm-static`."""
    # Threads that compute one operator together wait for each other. If they waited busily, as libgomp lets them, each
    # would keep the other from a core that further processes want as well, and steps would take several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _run("swarm-static", "peers.static.program", ("peers.static.options", "explain"))
