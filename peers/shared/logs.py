"""Sets up a program's log: one line a record, on stderr.

Each program sets this up once it knows its options. Nothing here decides what is worth a line.
"""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from peers.shared.stopping import describe
from swarm.machine.out_of_memory import is_out_of_memory, what_was_asked
from swarm.machine.words import ABOUT, printable

LogLevel = Annotated[Literal["debug", "info", "warning", "error"], tyro.conf.arg(help="debug, info, warning or error.")]


def setup_logging(name: str, level: LogLevel) -> None:
    """Log to stderr, one line a record, each with the peer's `name`; tracebacks at level `debug` only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter(name, tracebacks=level == "debug"))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    threading.excepthook = _log_faults(threading.excepthook)
    sys.unraisablehook = _log_faults(sys.unraisablehook)
    # What other packages log is of no use to the user of this program.
    for package in ("asyncio", "datasets", "hivemind", "huggingface_hub", "matplotlib", "urllib3", "wandb"):
        logging.getLogger(package).setLevel("DEBUG" if level == "debug" else "ERROR")


def _log_faults(hook: Callable[[Any], object]) -> Callable[[Any], None]:
    """Wrap Python's hook for errors of threads or destructors: errors that are not bugs are logged without a traceback.
    A lack of memory is not a bug. Nor is an OSError, such as a full disk when a library writes in its own thread."""

    def log(raised: Any) -> None:
        error, logger = raised.exc_value, logging.getLogger(__name__)
        if error is not None and is_out_of_memory(error):
            logger.error("out of memory: no room for %s", what_was_asked(error), exc_info=error)
        elif isinstance(error, OSError):
            logger.error("something in the background has ended", exc_info=error)
        else:
            hook(raised)

    return log


class _OneLineFormatter(logging.Formatter):
    def __init__(self, name: str, *, tracebacks: bool) -> None:
        line = f"%(asctime)s {name.replace('%', '%%')} %(levelname)s: %(about)s%(message)s"
        super().__init__(line, datefmt="%H:%M:%S")
        self._tracebacks = tracebacks

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.about = ABOUT.get()
        line = super().formatMessage(record)
        if record.exc_info and not self._tracebacks:
            line += f" ({describe(record.exc_info[1])})"
        return printable(" ".join(line.splitlines()))

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if self._tracebacks else ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n")
