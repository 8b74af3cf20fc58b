"""Starts, watches and ends p2pd, the libp2p process beneath a DHT node.

The DHT itself is not known here.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_STOP_SECONDS = 2.0
# Not in TMPDIR, which may be long: a socket's path has at most 108 characters. hivemind's sockets are in /tmp as well.
_PLACE, _PREFIX = Path("/tmp"), "swarm-p2pd-"
_SOCKET = "control.sock"
_START_SECONDS = 60.0

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
    """A running p2pd.

    Attributes:
        control_address: multiaddress of its control socket.
        ended: done once the process has ended, for whatever reason.
    """

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
        """End the process, by force if necessary, and remove its socket."""
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


async def launch(program: Path, options: Sequence[str]) -> Daemon:
    """Start p2pd and wait until its control socket answers. Cancellation leaves nothing behind.

    When the thread that calls this ends, the kernel ends p2pd.

    Raises:
        OSError: p2pd ended at once; the message is its last line.
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
