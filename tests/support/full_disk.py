"""A disk that fills up."""

import errno
import os

import pytest


class FullDisk:
    """A disk on which os.write may write only this many more bytes. Tests change the number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(os, "write", self._write_what_fits)

    def _write_what_fits(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_written = self._write(file, data[: self.room])
        self.room -= num_written
        return num_written
