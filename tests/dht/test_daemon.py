"""Daemons that do not start, and files of daemons that were killed together with their owner."""

import os
import socket
from pathlib import Path

import pytest

from swarm.dht import daemon


def _folder(place: Path, name: str, *, old: bool = True) -> Path:
    folder = place / f"swarm-p2pd-{name}"
    folder.mkdir()
    return _aged(folder) if old else folder


def _aged(folder: Path) -> Path:
    os.utime(folder, (1.0, 1.0))
    return folder


def test_only_folders_where_nobody_listens_are_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as gone:
        alive, dead, empty, new = (
            _folder(tmp_path, "alive"), _folder(tmp_path, "dead"), _folder(tmp_path, "empty"),
            _folder(tmp_path, "new", old=False),
        )  # fmt: skip
        server.bind(str(alive / "control.sock"))
        server.listen()
        gone.bind(str(dead / "control.sock"))
        gone.close()
        _aged(alive)
        _aged(dead)
        others = tmp_path / "somebody-elses"
        others.mkdir()
        daemon.remove_leftovers(tmp_path)
        assert [folder.exists() for folder in (alive, dead, empty, new, others)] == [True, False, False, True, True]


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("fatal error: failed to reserve page summary memory\n\nruntime stack:\n\tasm_amd64.s:349 +0x11c", "memory"),
        ("some news\nlisten tcp4 0.0.0.0:1: bind: permission denied", "permission denied"),
    ],
    ids=["without memory", "otherwise"],
)
async def test_one_that_does_not_start_says_why_in_one_line(tmp_path: Path, says: str, reason: str) -> None:
    program = tmp_path / "p2pd"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit 2\n")
    program.chmod(0o700)
    with pytest.raises(OSError, match=rf"^the DHT's process, p2pd, did not start: [^\n]*{reason}$"):
        await daemon.launch(program, [])
