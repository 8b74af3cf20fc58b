"""The event log: what a process did, in order, with one line of JSON for each event.

Peers and trainers append to a file of their own (`--events FILE`), and swarm/audit reads the files of a run. A log
never stops a process: while its disk is full, events are only counted, and later a Gap says how many were lost.
"""

import json
import threading
from pathlib import Path

from swarm.events.kinds import NAMES, Event, Events, Gap
from swarm.machine.clock import Clock
from swarm.machine.json_file import LineFile

_NAME_OF = {event: name for name, event in NAMES.items()}
_encode = json.JSONEncoder(separators=(",", ":")).encode


class EventLog(Events):
    """Appends to one file, from any thread."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises OSError if the file can neither be opened nor made."""
        self._file = LineFile(path, "events")
        self._clock = clock
        self._lock = threading.Lock()
        self._num_lost = 0

    def write(self, event: Event) -> None:
        with self._lock:
            if self._num_lost and not self._append(Gap(lost=self._num_lost)):
                self._num_lost += 1
                return
            self._num_lost = 0 if self._append(event) else 1

    def close(self) -> None:
        """Write nothing more."""
        self._file.close()

    def _append(self, event: Event) -> bool:
        fields = _encode({name: value for name, value in vars(event).items() if value is not None})
        times = f'"time":{self._clock.time():.6f},"monotonic":{self._clock.monotonic():.6f}'
        comma = "," if len(fields) > 2 else ""
        return self._file.append(f'{{"event":"{_NAME_OF[type(event)]}",{times}{comma}{fields[1:]}')


def boot_id() -> str:
    """An id of the machine's present boot, which no other boot has. Empty if the system does not provide one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
