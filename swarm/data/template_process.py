"""Starts, asks and ends a child process that renders a chat template.

    data/chat -> TemplateProcess.ask -> a request over its stdin, an answer over its stdout -> data/template_child

The first request starts the child, and so does one after it was ended.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

EXIT_NO_MEMORY = 3
"""The child's exit code when it needed more memory than it may have."""
MOST_CHARACTERS = 16 << 20
"""The most characters of a rendered text; conversations of datasets and of requests are shorter."""
_MOST_ANSWER_BYTES = 8 * MOST_CHARACTERS
_LENGTH_BYTES = 8
# With -P, modules that happen to lie in the current folder are not imported instead of ours.
_COMMAND = [sys.executable, "-P", "-c", "from swarm.data.template_child import main; main()"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits for a template.

    Attributes:
        seconds: processor time for one rendering. It is not wall time, so that none is refused because the machine is
            busy.
        memory_bytes: address space of its process. macOS does not enforce this.
        characters: the most that are rendered, again and again, to find what the assistant said. It is no time, so that
            the same conversations are refused on every machine. It suffices for 4,000 messages of a line each.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    characters: int = 1 << 30


class TemplateProcess:
    def __init__(self, opening: Mapping[str, Any], limits: Limits) -> None:
        """`opening` is the message that the child gets before the first request."""
        self._opening = {**opening, **asdict(limits)}
        self._limits = limits
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ending: Callable[[], object] = lambda: None
        self._num_closes = 0

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request to the child and return its answer. Blocks. If a signal handler raises an exception meanwhile,
        the child is ended. Raises ValueError, of one line, if the template cannot be rendered, or not within the
        limits, and OSError if no process can be started."""
        num_closes = self._num_closes
        with self._turn:
            child = self._started()
            if self._num_closes > num_closes:
                # It was closed before there was a child to end.
                self._ending()
                raise ValueError("the chat template's process was closed")
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    write(child.stdin, request)
                reply = read(child.stdout, _MOST_ANSWER_BYTES)
            except RecursionError:
                self._ending()
                raise ValueError("the messages are nested too deeply for a chat template") from None
            except BaseException:
                # The child is ended, because otherwise the next request would get the answer to this one.
                self._ending()
                raise
            if reply is None:
                self._ending()
                raise ValueError(f"the chat template cannot be rendered: {self._end_of(child)}")
            if "fault" in reply:
                raise ValueError(reply["fault"])
            return reply["answer"]

    def close(self) -> None:
        """End the child, if there is one. Callers that wait for its answer, or for their turn, get a ValueError. Any
        thread may call this."""
        self._num_closes += 1
        self._ending()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._ending()
            # The child gets a session of its own, so that Ctrl-C reaches only the program.
            self._child = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            self._ending = weakref.finalize(self, _end, self._child)
            assert self._child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                write(self._child.stdin, self._opening)
        return self._child

    def _end_of(self, child: subprocess.Popen[bytes]) -> str:
        if child.returncode == -signal.SIGPROF:
            return f"it computes for more than {self._limits.seconds:g} seconds"
        if child.returncode == EXIT_NO_MEMORY:
            return f"it takes more than {self._limits.memory_bytes >> 20} MiB of memory"
        return f"its process ended ({child.returncode})"


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        # `close` sends what is still in a buffer, which may fail.
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


def read(stream: IO[bytes], most_bytes: int = sys.maxsize) -> Any:
    """Read a value that `write` has written; None at the stream's end, or if the value is larger than `most_bytes`."""
    num_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    content = stream.read(num_bytes) if 0 < num_bytes <= most_bytes else b""
    return json.loads(content.decode("utf-8", "surrogatepass")) if num_bytes == len(content) > 0 else None


def write(stream: IO[bytes], value: Any) -> None:
    """Write a value as JSON, after its length. Objects that JSON does not know are written as their str."""
    content = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    stream.flush()
