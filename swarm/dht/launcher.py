"""Launches this process's node, p2pd and hivemind's node over it, in a thread with an event loop of its own.

A busy program so delays no answer of the DHT, nor the DHT the program. hivemind's DHT is imported once a launcher is
made, and without hivemind's own __init__, which would import its experts and optimizers, and torch.
"""

import asyncio
import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarm.dht import addresses
from swarm.dht.addresses import Node
from swarm.dht.known_records import RecordValidator
from swarm.machine.clock import Clock

if TYPE_CHECKING:
    from swarm.dht.kademlia import Kademlia

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CLIENT_OPTIONS = ("-dhtClient=1", "-noListenAddrs=1")
"""Options of p2pd for a node that asks others, but cannot be asked and stores nothing."""
_STOP_SECONDS = 2.0
# Not in TMPDIR, which may be long: a socket's path has at most 108 characters. hivemind's sockets are in /tmp as well.
_PLACE, _PREFIX = Path("/tmp"), "swarm-p2pd-"
_SOCKET = "control.sock"
_START_SECONDS = 60.0
_IMPORTING = threading.Lock()
"""Held while packages stand in for hivemind's: another thread must not take them for it."""

# The process that becomes p2pd sets PR_SET_PDEATHSIG itself, because this setting survives exec but not fork. So p2pd
# dies with us, even if we are killed with -9. In a process group of its own p2pd does not get the terminal's Ctrl-C,
# because a leaving peer still needs it. A preexec_fn is not used: it could deadlock in a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
os.setpgid(0, 0)
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl:
    prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Daemon:
    """A running p2pd, with the multiaddress of its control socket, which has `ended` for whatever reason."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, control_address: str) -> None:
        self.control_address = control_address
        self.ended = asyncio.create_task(self._drain())
        self._process = process
        self._folder = folder

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        # Read all the time, because p2pd would block once the pipe is full.
        async for line in self._process.stdout:
            logger.debug("p2pd: %s", line.decode(errors="replace").rstrip())
        await self._process.wait()

    async def stop(self) -> None:
        try:
            self._signal(signal.SIGTERM)
            await asyncio.wait({self.ended}, timeout=_STOP_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            await self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        # The process may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


async def launch_daemon(program: Path, options: Sequence[str]) -> Daemon:
    """Start p2pd and wait until its control socket answers. Cancellation leaves nothing behind.

    When the thread that calls this ends, the kernel ends p2pd. Raises OSError, with p2pd's last line, if it ended at
    once.
    """
    remove_leftovers(_PLACE)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PLACE))
    control_address = f"/unix{folder / _SOCKET}"
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())),
            *(str(program), f"-listen={control_address}", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        await _await_ready(process)
    except BaseException:
        await Daemon(process, folder, control_address).stop()
        raise
    return Daemon(process, folder, control_address)


def remove_leftovers(place: Path) -> None:
    """Remove the folders that killed daemons left: old ones with a socket on which no process listens."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _START_SECONDS:
                continue
            client.settimeout(1.0)
            if client.connect_ex(str(folder / _SOCKET)) in (errno.ECONNREFUSED, errno.ENOENT):
                shutil.rmtree(folder)


async def _await_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    reason = "it said nothing"
    async for line in process.stdout:
        if line.startswith(b"Peer ID:"):
            return
        reason = line.decode(errors="replace").strip() or reason
        if reason.startswith("fatal error:"):
            break  # From Go's runtime, mostly when out of memory. Later lines name the place, not the cause.
    raise OSError(f"the DHT's process, p2pd, did not start: {reason}")


@contextmanager
def bare_package(name: str, *parts: str) -> Iterator[None]:
    """Let the block import parts of a package without the package's own __init__.

    `parts` are modules of the package whose names the block imports from the package itself. A later import of the
    package imports all of it. If the package was imported before, the block changes nothing. Raises
    ModuleNotFoundError.
    """
    if name in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        for part in parts:
            own = {key: value for key, value in vars(package).items() if key.startswith("__")}
            vars(package).update(vars(importlib.import_module(f"{name}.{part}")) | own)
        yield
    finally:
        del sys.modules[name]


class Launcher:
    """Launches one process's node, each time with the settings of node.start, and with one validator, which holds the
    run's keys.

    It listens at a TCP `port`, which is 0 if it began as a client.
    """

    def __init__(
        self, *, clock: Clock, host: str, port: int, announce: Sequence[tuple[str, int]], identity_path: Path | None,
        client_mode: bool,
    ) -> None:  # fmt: skip
        """Raises ValueError if the port is in use."""
        self.port = 0 if client_mode else addresses.require_free_port(host, port)
        self._options = [] if client_mode else _server_options(host, self.port, announce)
        self._clock = clock
        self._kademlia = _import_kademlia()
        self.validator: RecordValidator = self._kademlia.new_validator(clock)
        if identity_path is not None:
            self._kademlia.require_key_file(identity_path)
            self._options.append(f"-id={identity_path}")

    async def launch(self, known: Sequence[Node], *, client_mode: bool, must_join: bool = False) -> "Kademlia":
        launched: Kademlia = await self._kademlia.launch(
            known, options=CLIENT_OPTIONS if client_mode else self._options, client_mode=client_mode,
            validator=self.validator, clock=self._clock, must_join=must_join,
        )  # fmt: skip
        return launched


def _import_kademlia() -> Any:
    """Import the module kademlia, with only the part of hivemind that it needs, and set up hivemind's logging."""
    level = logging.getLogger("hivemind").level
    utils = ("serializer", "logging", "timed_storage", "asyncio")
    with _IMPORTING, warnings.catch_warnings(), bare_package("hivemind"), bare_package("hivemind.utils", *utils):
        warnings.simplefilter("ignore")
        with bare_package("hivemind.dht"):
            from swarm.dht import kademlia
    # hivemind's import has reset the level.
    kademlia.use_own_log(level or logging.ERROR)
    return kademlia


def _server_options(host: str, port: int, announce: Sequence[tuple[str, int]]) -> list[str]:
    options = ["-dhtServer=1", f"-hostAddrs={','.join(addresses.at(one, port) for one in addresses.hosts(host))}"]
    if announce:
        outside = (addresses.at(name, outer_port or port) for name, outer_port in announce)
        options.append(f"-announceAddrs={','.join(outside)}")
    return options


class LoopThread:
    """Runs coroutines in a thread until it is closed. As a daemon thread it does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self.loop = _Loop()
        # When neighbours or p2pd die, hivemind leaves failed tasks behind. Their tracebacks are of no use, so only a
        # debug line is logged.
        self.loop.set_exception_handler(lambda _, context: logger.debug("%s: %s", name, context.get("message")))
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work to its end while the calling thread waits. If the wait is interrupted, the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work to its end, awaited in another loop. Cancellation cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def close(self) -> None:
        """Cancel all work, close the connections that it leaves open, and end the thread."""
        self.run(self._end_work())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_work(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for connection in list(self.loop.connections):
            connection.abort()
        # Closed connections and cancelled tasks end in the loop's next turn.
        await asyncio.sleep(0)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that keeps a list of its connections to p2pd, because hivemind leaves one open when a call that uses it is
    cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().create_unix_connection(*args, **options)
        self.connections.add(transport)
        return transport, protocol
