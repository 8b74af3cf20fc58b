"""Only the needed parts of a package are imported."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from swarm.dht.launcher import bare_package, launch_daemon, remove_leftovers


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with the parts `wanted` and `costly`, whose own __init__ imports both."""
    name = "package_with_a_costly_part"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(f"from {name} import costly, wanted\n")
    (folder / "wanted.py").write_text("VALUE = 1\n")
    (folder / "costly.py").write_text("VALUE = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_a_part_comes_alone_and_later_the_whole_with_the_same_part(package: str) -> None:
    with bare_package(package):
        part = import_module(f"{package}.wanted")
        assert f"{package}.costly" not in sys.modules
    whole = import_module(package)
    assert (whole.wanted, whole.costly.VALUE) == (part, 2)
    with bare_package(package):
        assert sys.modules[package] is whole


@pytest.mark.slow
def test_the_dht_needs_neither_hivemind_s_averaging_nor_its_experts() -> None:
    script = """
import sys
from swarm.dht.launcher import bare_package
with bare_package("hivemind"):
    from swarm.dht import kademlia
assert not {"hivemind.averaging", "hivemind.moe", "hivemind.optim"} & sys.modules.keys()
assert kademlia._P2PD.is_file()
assert "hivemind.averaging" not in sys.modules
from hivemind import DecentralizedAverager
"""
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


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
        remove_leftovers(tmp_path)
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
        await launch_daemon(program, [])
