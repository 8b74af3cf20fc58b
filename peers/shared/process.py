"""What a program asks of the system for its own process: environment, memory, and death with the parent.

Knows nothing about swarms, and imports neither grpc nor hivemind: both read the environment that is prepared here.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import warnings
from collections.abc import Callable

from swarm.machine.out_of_memory import in_words

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_NO_READER = 128 + signal.SIGPIPE


THREAD_BYTES = 128 << 20
"""Bytes of address space for the stacks of the threads that gRPC and asyncio start: about sixteen of 8 MiB."""
MOST_OPEN_FILES = 65_536
"""The open files and connections that a process is allowed at most, unless the user has allowed it more."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # mallopt(3)


def prepare_environment() -> None:
    """Set the variables that grpc, hivemind and tokenizers read at import; those that the user has set stay."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # Children (p2pd, wandb) are made by fork and exec.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)


def keep_freed_memory() -> None:
    """Make the C library keep freed memory, for the next thread of this process that allocates.

    By default glibc allocates large tensors in pages of their own, and gives each thread an arena in pieces of 64 MiB.
    Both go back to the system as soon as they are empty. A microbatch's gradients, and the vectors at the end of a
    round, are as large as the stage's weights. The system would clear each of their pages at every allocation, which
    took most of the time at the end of a round. With this, a process keeps the memory that it once needed, except more
    than 2 GiB of free memory at the heap's end.

    This does nothing if the user has set MALLOC_*, or with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def require_addresses(num_bytes: int) -> None:
    """Raise MemoryError if this process's limit (ulimit -v, prlimit --as) leaves less address space than `num_bytes`.
    Call this before large libraries are imported, and before gRPC starts its threads. If address space runs out, some
    libraries end the process without a message, and some wait for ever."""
    if num_bytes == 0 or address_limit() is None:
        return
    try:
        # The address space is reserved without being used, and freed at once.
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except OSError:
        raise MemoryError(f"unable to allocate {in_words(num_bytes)}") from None


def allow_open_files() -> None:
    """Raise this process's limit of open files and connections (ulimit -n) as far as the system lets it. By default it
    is 1024, so one stranger with as many idle connections would keep all others from a peer."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if most == resource.RLIM_INFINITY else min(MOST_OPEN_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        # macOS may refuse a number that its own limit for all processes does not allow.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def address_limit() -> int | None:
    """The limit of this process's address space in bytes; None if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def die_with_parent(parent: int | None = None) -> Callable[[], None]:
    """Make the `preexec_fn` for a child that the kernel kills when this process dies, however it dies. The kernel kills
    the child when the *thread* that started it ends: start such children from a thread that lives as long as the
    process. Does nothing where the system has no prctl. `parent` is the id of the parent's process, by default of this
    one; a process that calls the function for itself names the one that started it."""
    parent = parent or os.getpid()
    # prctl is looked up here, because few operations are safe between fork and exec.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def in_child() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(EXIT_FAILURE)

    return in_child
