"""What every program does with its own process: environment, memory, logging, exit codes, signals, parent's death.

Called by peers/commands before a program is loaded, by the programs for `interruptible` and `stop_event`, and by
peers/local/supervisor for `die_with_parent`. Knows nothing about swarms, and imports neither grpc nor hivemind: both
read the environment that is prepared here.
"""

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
import resource
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, TextIO, TypeVar

from swarm.errors import SwarmError
from swarm.machine.out_of_memory import in_words, is_out_of_memory, what_was_asked

LogLevel = Literal["debug", "info", "warning", "error"]
Result = TypeVar("Result")

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_NO_READER = 128 + signal.SIGPIPE

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # mallopt(3)
_FAULTS = (ValueError, SwarmError, OSError)


def prepare_environment() -> None:
    """Set the variables that grpc, hivemind and tokenizers read at import; those that the user has set stay."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # Children (p2pd, wandb) are made by fork and exec.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for the next thread of this process that wants memory.

    glibc by itself gives large tensors pages of their own, and each thread an arena in pieces of 64 MiB; both go back
    to the system as soon as they are empty. A microbatch's gradients, and the vectors of a round's end, are as large as
    the stage's weights. The system would clear each of their pages every time, which was most of a round's end. So a
    process keeps the memory that it once needed, except what is free at the heap's end beyond 2 GiB. This does nothing
    where the user has set MALLOC_*, or with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


THREAD_BYTES = 128 << 20
"""Bytes of address space for the stacks of the threads that gRPC and asyncio start: about sixteen of 8 MiB."""


def require_addresses(num_bytes: int) -> None:
    """Raise MemoryError if this process's limit (ulimit -v, prlimit --as) leaves less address space than `num_bytes`.

    Call this before large libraries are imported, and before gRPC starts its threads: where address space runs out,
    some libraries end the process without a word, and some wait for ever.
    """
    if num_bytes == 0 or _address_limit() is None:
        return
    try:
        # The address space is reserved without being used, and freed at once.
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except OSError:
        raise MemoryError(f"unable to allocate {in_words(num_bytes)}") from None


def setup_logging(name: str, level: LogLevel) -> None:
    """Log to stderr, one line a record, each with the peer's `name`; tracebacks at level `debug` only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter(name, tracebacks=level == "debug"))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    threading.excepthook = _log_shortage(threading.excepthook)
    sys.unraisablehook = _log_shortage(sys.unraisablehook)
    # The user of this program has no use for what other packages log.
    for package in ("asyncio", "datasets", "hivemind", "huggingface_hub", "matplotlib", "urllib3", "wandb"):
        logging.getLogger(package).setLevel("DEBUG" if level == "debug" else "ERROR")


def _log_shortage(hook: Callable[[Any], object]) -> Callable[[Any], None]:
    """Wrap Python's hook for what a thread or a destructor raises: instead of a traceback, log a lack of memory."""

    def log(raised: Any) -> None:
        if raised.exc_value is None or not is_out_of_memory(raised.exc_value):
            hook(raised)
            return
        error = raised.exc_value
        logging.getLogger(__name__).error("out of memory: no room for %s", what_was_asked(error), exc_info=error)

    return log


class _OneLineFormatter(logging.Formatter):
    def __init__(self, name: str, *, tracebacks: bool) -> None:
        super().__init__(f"%(asctime)s {name.replace('%', '%%')} %(levelname)s: %(message)s", datefmt="%H:%M:%S")
        self._tracebacks = tracebacks

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if record.exc_info and not self._tracebacks:
            line += f" ({_describe(record.exc_info[1])})"
        return printable(" ".join(line.splitlines()))

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if self._tracebacks else ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n")


def printable(text: str, *, keep: str = "") -> str:
    """The text with a space for each unprintable character that is not in `keep`.

    Much of what programs show comes from strangers, and a terminal takes control characters for commands.
    """
    return "".join(char if char.isprintable() or char in keep else " " for char in text)


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its class if it has none."""
    return str(error).partition("\n")[0] or type(error).__name__


def run_program(prog: str, main: Callable[[], int]) -> int:
    """Run a program and turn every fault that is not a bug into one line on stderr.

    A ValueError is the user's fault (exit code 2); SwarmError, OSError and a lack of memory come from the world (1);
    Ctrl-C gives 130, SIGTERM 143; and where nothing reads the output any more (`| head`), the code is 141, without a
    line. Of an ExceptionGroup a lack of memory is reported, or else the first fault. Log level `debug` shows the
    traceback as well.

    Returns:
        The exit code.

    Raises:
        Exception: anything else, a bug, with its traceback.
    """
    try:
        exit_code = main()
        sys.stdout.flush()
        return exit_code
    except Terminated:
        print(f"{prog}: terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        faults = list(leaves(error))
        if any(isinstance(fault, BrokenPipeError) for fault in faults) and _has_lost_reader(sys.stdout):
            # Python flushes stdout when it ends, and would complain that nothing reads it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_NO_READER
        shortages = [shortage for fault in faults if (shortage := _shortage(fault)) is not None]
        if not all(isinstance(fault, _FAULTS) or _shortage(fault) for fault in faults):
            raise
        logging.getLogger().debug("where it went wrong:", exc_info=error)
        if shortages:
            print(f"{prog}: error: {_describe_shortage(shortages[0])}", file=sys.stderr)
            return EXIT_FAILURE
        fault = faults[0]
        print(f"{prog}: error: {_describe(fault)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(fault, ValueError) else EXIT_FAILURE


def _has_lost_reader(stream: TextIO) -> bool:
    """Whether the stream is a pipe of which the other end is closed."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGTERM interrupt the block as Ctrl-C does: for long work of the main thread that has to clean up."""

    def interrupt(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stop(asyncio.Event):
    """Set when the program is to end.

    Attributes:
        exit_code: the program's exit code if it ends before its work is done: by the signal that came, or for Ctrl-C.
    """

    exit_code = EXIT_INTERRUPTED

    def by(self, number: int) -> None:
        """Stop because this signal has come."""
        self.exit_code = 128 + number
        self.set()


def stop_event() -> Stop:
    """An event that SIGINT and SIGTERM set, for the running loop; a second Ctrl-C ends the process at once."""
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
    """Run both until one ends, then cancel the other and wait for its end; gives the result of `work`, or None if
    `stop` ended first. Raises what the one that ended raises."""
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


def die_with_parent(parent: int | None = None) -> Callable[[], None]:
    """Make the `preexec_fn` for a child that the kernel is to kill when this process dies, however it dies.

    The kernel kills the child when the *thread* that started it ends: start such children from a thread that lives as
    long as the process. Does nothing where the system has no prctl.

    Args:
        parent: this process; or, where the process itself makes and calls it, the one that started it.
    """
    parent = parent or os.getpid()
    # We look it up here, because little is safe between fork and exec.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def in_child() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(EXIT_FAILURE)

    return in_child


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in an ExceptionGroup, and in the groups inside it; of another error, itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def _shortage(error: BaseException | None) -> BaseException | None:
    """The lack of memory behind an error: itself, or one that led to it. A fault has none: it is reported as it is."""
    while error is not None and not is_out_of_memory(error):
        error = None if isinstance(error, _FAULTS) else error.__cause__ or error.__context__
    return error


def _describe_shortage(error: BaseException) -> str:
    text = f"out of memory: no room for {what_was_asked(error)}"
    if (limit := _address_limit()) is None:
        return f"{text}; close other programs, or take a machine with more memory"
    return f"{text}; this process may have {in_words(limit)} of addresses (ulimit -v, prlimit --as): allow it more"


def _address_limit() -> int | None:
    """The limit of this process's address space in bytes; None if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _describe(error: BaseException | None) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        text = f"{error.filename}: it should be a folder, and is a file or in a file; name another path"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error)
    if not isinstance(error, _FAULTS):
        text = f"{type(error).__name__}: {text}"
    return " ".join(printable(text).split()) or type(error).__name__
