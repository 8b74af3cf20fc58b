"""Reading one process's event log, line by line.

Used by audit/audit. A kill or a full disk can cut a line short. Such a line is skipped at the end of the file, or where
a later process went on writing. Any other line that is no event is an error that names the line's number. Keeps nothing
in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm.events.kinds import FORMAT, NAMES, Event, Gap, Start
from swarm.machine import json_file

_ADAPTERS: dict[str, TypeAdapter[Event]] = {name: TypeAdapter(event) for name, event in NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One event and its time.

    Attributes:
        monotonic: time in seconds; comparable among processes of one boot of one machine.
    """

    event: Event
    monotonic: float


def read(path: Path) -> Iterator[Line]:
    """Yield the events of a file. A file with nothing but one unfinished line gives none.

    Raises:
        ValueError: the file is no event log, or is broken; the message is one line.
        OSError: the file cannot be read.
    """
    broken: str | None = None
    started, text = False, b""
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = _parse(text)
            except ValueError as error:
                if broken is not None:
                    break
                broken = f"{path}: line {number} is no event ({error})"
                continue
            if broken is not None and not isinstance(line.event, Start | Gap):
                break
            broken = None
            if not started and not isinstance(line.event, Start):
                raise ValueError(f"{path}: no start before line {number}: this is not the whole log of a process")
            started = True
            if isinstance(line.event, Start) and line.event.format != FORMAT:
                raise ValueError(
                    f"{path} was written by swarm {line.event.software} in another format: audit it with that version"
                )
            yield line
        else:
            if not text.endswith(b"\n"):
                return  # The last line was cut short.
    if broken is not None:
        raise ValueError(broken)


def _parse(text: bytes) -> Line:
    try:
        values: dict[str, Any] = json_file.parse(text)
        name, monotonic = values.pop("event"), values.pop("monotonic")
        values.pop("time")
        event = _ADAPTERS[name].validate_python(values)
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['msg']}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(type(error).__name__ if not isinstance(error, ValueError) else "not JSON") from None
    return Line(event=event, monotonic=float(monotonic))
