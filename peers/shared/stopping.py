"""Why and how a program leaves: by SIGINT (Ctrl-C) or SIGTERM, with the end of its token, or by a fault, in one line on
stderr and with an exit code.

Programs with an event loop wait for `stop_event`; the others do their work in `interruptible`. Each command and each
bench runs its program in `run_program`. A bug keeps its traceback. This imports neither grpc nor hivemind, because
faults may happen before the environment of these is prepared.
"""

import asyncio
import contextlib
import datetime
import logging
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from peers.shared import process
from peers.shared.process import EXIT_INTERRUPTED
from swarm.errors import NotAllowed, SwarmError
from swarm.machine.out_of_memory import SMALLER, in_words, is_out_of_memory, what_was_asked
from swarm.machine.words import printable

if TYPE_CHECKING:
    from swarm.credentials.authority import Authority
    from swarm.credentials.identity import Identity
    from swarm.machine.clock import Clock

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often a program looks whether its token still lets it stay."""
FAREWELL_SECONDS = 90.0
"""A program begins to leave this many seconds before its token expires. After the expiry no peer answers it."""
Result = TypeVar("Result")
_FAULTS = (ValueError, SwarmError, OSError)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM interrupt the block as Ctrl-C does. For long work in the main thread that has to clean up."""

    def interrupt(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stop(asyncio.Event):
    """An event that is set when the program is to end. The program's exit code, if it ends before its work is done,
    depends on the signal; without one it is that for Ctrl-C."""

    exit_code = EXIT_INTERRUPTED

    def by(self, number: int) -> None:
        self.exit_code = 128 + number
        self.set()


def stop_event() -> Stop:
    """An event for the running loop, which SIGINT and SIGTERM set. A second Ctrl-C ends the process at once."""
    stop = Stop()

    def on_signal(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        stop.by(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def before(stop: Coroutine[Any, Any, object], work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run both until one ends. Then cancel the other one, and wait for its end. Return the result of `work`, or None if
    `stop` ended first. Raises the error of the one that ended first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop)
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        stopping.result()
        return None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait([working, stopping])


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Do these works while the block runs, and cancel them when it ends. An error of one of them ends the block and the
    others, and is raised in a group."""
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(work) for work in works]
        yield
        for task in background:
            task.cancel()


async def stop_or_expiry(stop: asyncio.Event, identity: "Identity", clock: "Clock") -> None:
    """Wait until `stop` is set. If the token is about to expire before that, or the owner revokes it, log it and set
    `stop`."""
    if identity.authority is None:
        await stop.wait()
        return
    while not stop.is_set():
        if why := _why_it_ends(identity, identity.authority, clock.time()):
            stop.set()
            logger.error("%s: leaving; ask the run's owner for a new one", why)
        await before(stop.wait(), clock.sleep(LOOK_SECONDS))


def _why_it_ends(identity: "Identity", authority: "Authority", now: float) -> str:
    """Why the token of this process does not let it stay; empty if it does."""
    try:
        expires_at = authority.member(identity.certificate_pem, now).expires_at
    except NotAllowed as error:
        return str(error)
    return f"the token expires at {in_utc(expires_at)}" if now >= expires_at - FAREWELL_SECONDS else ""


def in_utc(when: float) -> str:
    return f"{datetime.datetime.fromtimestamp(when, datetime.UTC):%Y-%m-%d %H:%M} UTC"


# -- faults ------------------------------------------------------------------------------------------------------------


def run_program(prog: str, main: Callable[[], int]) -> int:
    """Run a program and turn every fault that is not a bug into one line on stderr.

    A ValueError is the user's fault, with exit code 2. SwarmError, OSError and a lack of memory have exit code 1. The
    code is 130 after Ctrl-C, and 143 after SIGTERM. If nothing reads the output any more (`| head`), it is 141, and no
    line is printed. Of an ExceptionGroup, a lack of memory is reported if there is one, else the first fault. Log level
    `debug` shows the traceback as well.

    Returns:
        The exit code.

    Raises:
        Exception: any other error, which is a bug, with its traceback.
    """
    try:
        exit_code = main()
        sys.stdout.flush()
        return exit_code
    except Terminated:
        print(f"{prog}: terminated", file=sys.stderr)
        return process.EXIT_TERMINATED
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return process.EXIT_INTERRUPTED
    except Exception as error:
        faults = list(leaves(error))
        if any(isinstance(fault, BrokenPipeError) for fault in faults) and _has_lost_reader(sys.stdout):
            # Python flushes stdout when it ends, and would complain that nothing reads it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return process.EXIT_NO_READER
        shortages = [shortage for fault in faults if (shortage := _shortage(fault)) is not None]
        if not all(isinstance(fault, _FAULTS) or _shortage(fault) for fault in faults):
            raise
        logging.getLogger().debug("where it went wrong:", exc_info=error)
        if shortages:
            print(f"{prog}: error: {_describe_shortage(shortages[0])}", file=sys.stderr)
            return process.EXIT_FAILURE
        fault = faults[0]
        print(f"{prog}: error: {describe(fault)}", file=sys.stderr)
        return process.EXIT_USAGE if isinstance(fault, ValueError) else process.EXIT_FAILURE


def _has_lost_reader(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def leaves(error: BaseException) -> Iterator[BaseException]:
    """All errors in an ExceptionGroup and in the groups inside it. Any other error yields only itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def describe(error: BaseException | None) -> str:
    """An error in one line. If it is not a fault, the line begins with its class."""
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        text = f"{error.filename}: it should be a folder, and is a file or in a file; name another path"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error)
    if not isinstance(error, _FAULTS):
        text = f"{type(error).__name__}: {text}"
    return " ".join(printable(text).split()) or type(error).__name__


def _shortage(error: BaseException | None) -> BaseException | None:
    """The lack of memory behind an error: the error itself, or one that led to it. None for a fault, which is reported
    as it is."""
    while error is not None and not is_out_of_memory(error):
        error = None if isinstance(error, _FAULTS) else error.__cause__ or error.__context__
    return error


def _describe_shortage(error: BaseException) -> str:
    text = f"out of memory: no room for {what_was_asked(error)}"
    if (limit := process.address_limit()) is None:
        return f"{text}; close other programs, take a machine with more memory, or in training {SMALLER}"
    return f"{text}; this process may have {in_words(limit)} of addresses (ulimit -v, prlimit --as): allow it more"
