"""Only the needed parts of a package are imported."""

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from swarm.dht.launcher import LoopThread, bare_package


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


def test_one_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), bare_package("no_such_package"):
        pass


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


def test_connections_that_cancelled_work_leaves_open_are_closed_with_the_thread(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def connect() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_unix_connection(path)
        return writer

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        thread = LoopThread("test")
        writer = thread.run(connect())
        thread.close()
    assert writer.is_closing()
    del writer
    gc.collect()  # A connection that is still open would be reported here, and fail this test.
