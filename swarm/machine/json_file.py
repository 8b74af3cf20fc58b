"""JSON files, read and written: whole ones, and logs to which whole lines are appended.

Each line of a log is a single write, so several processes may append to one file at once, and a process that is killed
loses nothing that it wrote. If the disk is full, lines are lost, but the process goes on.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def parse(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError, of one line, which says why the text is no JSON, but not where it came
    from."""
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is not valid JSON: it is nested too deeply") from None
    except ValueError:
        # Python refuses longer numbers, since the time to read one grows with the square of its length.
        raise ValueError(f"it has a number of more than {sys.get_int_max_str_digits():,} digits") from None


def read_object(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file. A missing file may count as an empty object. Raises ValueError if the file cannot
    be read, or holds no JSON object; the message is one line."""
    if is_optional and not path.is_file():
        return {}
    try:
        values = parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"cannot read {path}: it holds no JSON object")
    return values


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, indented for people. Raises OSError, or ValueError for NaN and infinity."""
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


class LineFile:
    """Appends to one file. `is_complete` says whether all lines so far were written."""

    def __init__(self, path: Path, what: str) -> None:
        """Raises OSError if the file can neither be opened nor made. `what` names the lines in this process's log."""
        self._path = path
        self._what = what
        # If a killed writer left an unfinished line, the next line begins on a line of its own.
        self._is_torn = path.exists() and not _ends_with_newline(path)
        self._is_losing = False
        self.is_complete = True
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, line: str) -> bool:
        """Write a line, given without its line break, and return whether all of it was written.

        If several lines in a row are lost, only the first is reported in the log.
        """
        data = (("\n" if self._is_torn else "") + line + "\n").encode()
        try:
            num_written, reason = os.write(self._file, data), "the disk is full"
        except OSError as error:
            num_written, reason = 0, error.strerror or str(error)
        if num_written:
            self._is_torn = num_written < len(data)
        was_losing, self._is_losing = self._is_losing, num_written < len(data)
        self.is_complete &= not self._is_losing
        if self._is_losing and not was_losing:
            logger.error("%s are not written to %s: %s", self._what, self._path, reason)
        return not self._is_losing

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Leave out all lines that are not wanted. No other process may write meanwhile. Raises OSError."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if wanted(line)]
        if len(kept) == len(lines):
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        temporary.replace(self._path)
        os.close(self._file)
        self._file, self._is_torn = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), False

    def close(self) -> None:
        os.close(self._file)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
