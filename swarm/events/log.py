"""The event log: what a process did, one line of JSON each, in the order in which it did it.

Peers and trainers append to a file of their own (`--events FILE`); swarm/audit reads the files of a run. Each event is
one write to a descriptor opened for appending, so a process that is killed loses nothing that it wrote. A log never
stops a process: while its disk is full, events are counted, and the log says so later.
"""

import json
import logging
import os
import threading
from pathlib import Path

from swarm.events.kinds import NAMES, Event, Gap
from swarm.machine.clock import Clock

logger = logging.getLogger(__name__)

_NAME_OF = {event: name for name, event in NAMES.items()}
_encode = json.JSONEncoder(separators=(",", ":")).encode


class EventLog:
    """Appends to one file."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises OSError if the file can neither be opened nor made."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._num_lost = 0
        # What its last writer left unfinished stays a line of its own.
        self._is_torn = path.exists() and not _ends_with_newline(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        with self._lock:
            if self._num_lost and not self._append(Gap(lost=self._num_lost)):
                self._num_lost += 1
                return
            self._num_lost = 0
            if not self._append(event):
                self._num_lost = 1

    def close(self) -> None:
        """Write nothing more."""
        os.close(self._file)

    def _append(self, event: Event) -> bool:
        fields = _encode({name: value for name, value in vars(event).items() if value is not None})
        times = f'"time":{self._clock.time():.6f},"monotonic":{self._clock.monotonic():.6f}'
        comma = "," if len(fields) > 2 else ""
        text = f'{{"event":"{_NAME_OF[type(event)]}",{times}{comma}{fields[1:]}\n'
        line = (("\n" if self._is_torn else "") + text).encode()
        try:
            num_written = os.write(self._file, line)
        except OSError as error:
            if not self._num_lost:
                logger.error("events are not written to %s: %s", self._path, error)
            return False
        self._is_torn = num_written < len(line)
        if self._is_torn and not self._num_lost:
            logger.error("events are not written to %s: the disk is full", self._path)
        return not self._is_torn


def boot_id() -> str:
    """Of this machine, another one after every boot; empty where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
