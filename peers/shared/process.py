"""What a program asks of the system for its own process: environment, cache, memory, and death with the parent.

Knows nothing about swarms, and imports neither grpc nor hivemind: both read the environment that is prepared here.
"""

import contextlib
import ctypes
import mmap
import os
import re
import resource
import signal
import warnings
from collections.abc import Callable, MutableMapping
from pathlib import Path

from swarm.machine.out_of_memory import in_words

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_NO_READER = 128 + signal.SIGPIPE

KEYS = ("HF_TOKEN", "WANDB_API_KEY")
"""The variables that are read from `.env`; a file that happens to lie there changes nothing else of a program."""
_LINE = re.compile(r"\s*(?:export\s+)?(\w+)\s*=\s*(.*?)\s*")
_QUOTED = re.compile(r"""(["'])(.*)\1(?:\s+#.*)?""")
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


# -- what the environment and .env of the working folder say --------------------------------------------------------


def cache_folder() -> Path:
    """The folder of this user's keys and prepared texts. Raises ValueError if the environment names none."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise ValueError("there is no home directory: say in XDG_CACHE_HOME where to keep keys and prepared texts")
    return Path(folder) / "swarm"


def kept_tokenizer(cache: Path, digest: str) -> Path:
    return cache / "tokenizers" / digest


def keep_compiled_code(environment: MutableMapping[str, str]) -> None:
    """Have torch.compile keep its code in this user's folder, unless the environment names another one. By itself torch
    takes a folder of /tmp, which is gone when the machine starts again. Raises ValueError as cache_folder."""
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


def read_dotenv(path: Path = Path(".env")) -> None:
    """Add the variables of a file to the environment; do nothing if there is no file.

    Lines are `NAME=VALUE`, perhaps with `export` before them, quotes around the value or a comment behind it.

    Raises:
        ValueError: the file cannot be read, or a name has no value that could be a key. The message quotes no value.
    """
    try:
        if path.exists() and not path.is_file():
            # It may be a folder (some keep their virtual environment there), or a pipe, whose end we would wait for.
            return
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read {path}: {reason}") from None
    for number, line in enumerate(lines, start=1):
        if (found := _LINE.fullmatch(line)) and found[1] in KEYS and found[1] not in os.environ:
            os.environ[found[1]] = _value(found[2], f"{path}, line {number}: {found[1]}")


def _value(text: str, place: str) -> str:
    if text.startswith(('"', "'")):
        quoted = _QUOTED.fullmatch(text)
        value = "" if quoted is None else quoted[2]
    else:
        value = re.split(r"(?:^|\s)#", text)[0].strip()
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{place} has no key: write NAME=KEY, or leave the line out")
    return value
