"""A DHT node whose process p2pd dies or hangs, and what is left of it when its owner dies."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.benches.shared.ports import free_ports
from swarm.dht import node as dht_node
from swarm.dht.node import DhtNode
from swarm.errors import PeerUnavailable
from tests.dht.nodes import OWNER, Start, p2pd_of, sealed_note
from tests.support.chain import eventually
from tests.support.processes import is_running, wait_until_gone


async def test_without_p2pd_calls_fail_at_once(
    start: Start, first: DhtNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dht_node, "RESTART_SECONDS", 60.0)
    node = start(first.addresses())
    p2pd_of(node).kill()
    await eventually(lambda: "p2pd, has died" in caplog.text)
    begin = time.monotonic()
    with pytest.raises(PeerUnavailable, match="p2pd, has died"):
        await node.get("notes")
    assert time.monotonic() - begin < dht_node.CALL_SECONDS / 2
    node.shutdown()


async def test_p2pd_is_brought_back_with_its_address(
    start: Start, first: DhtNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swarm.dht")
    node = start(first.addresses(), identity_path=tmp_path / "peer.p2p", port=free_ports(1)[0])
    addresses = node.addresses()
    for _ in range(2):
        killed = p2pd_of(node)
        killed.kill()
        value, expiration = await _store_once_it_is_back(node, "after")
        assert p2pd_of(node).pid != killed.pid
        assert node.addresses() == addresses
        assert await first.get("after") == {OWNER.peer_id: (value, expiration)}, "it is in the same DHT again"
        late = start(node.addresses())
        assert await late.get("after") == {OWNER.peer_id: (value, expiration)}, "and others can join there"
    said = [record.getMessage() for record in caplog.records if "p2pd" in record.getMessage()]
    assert [line.split(",")[1].split(":")[0].strip() for line in said] == ["p2pd", "and this peer in the DHT"] * 2
    node.shutdown()


async def _store_once_it_is_back(node: DhtNode, key: str) -> tuple[bytes, float]:
    async with asyncio.timeout(60.0):
        while True:
            expiration = time.time() + 30
            value = sealed_note(key, expiration)
            try:
                if await node.store(key, OWNER.peer_id, value, expiration):
                    return value, expiration
            except PeerUnavailable:
                await asyncio.sleep(0.1)


async def test_p2pd_that_cannot_start_is_tried_again_and_the_end_does_not_wait(
    start: Start, first: DhtNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails_again(times: int) -> None:
        before = caplog.text.count("p2pd did not start")
        await eventually(lambda: caplog.text.count("p2pd did not start") >= before + times)

    caplog.set_level(logging.DEBUG, logger="swarm.dht")
    monkeypatch.setattr(dht_node, "RESTART_SECONDS", 0.05)
    node = start(first.addresses(), identity_path=tmp_path / "peer.p2p", port=free_ports(1)[0])
    key = tmp_path / "peer.p2p"
    away = key.rename(tmp_path / "away")
    p2pd_of(node).kill()
    await fails_again(2)
    with pytest.raises(PeerUnavailable, match="has died, and is being started again"):
        await node.get("notes")
    away.rename(key)
    await _store_once_it_is_back(node, "again")
    key.unlink()
    p2pd_of(node).kill()
    await fails_again(1)
    begin = time.monotonic()
    node.shutdown()
    assert time.monotonic() - begin < dht_node.START_SECONDS / 2


def _thread_states(pid: int) -> list[str]:
    return [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
async def test_a_call_has_a_deadline(start: Start, first: DhtNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start(first.addresses())
    p2pd = p2pd_of(node)
    p2pd.suspend()
    # The threads of p2pd stop one by one, when each is scheduled.
    while any(status != "T" for status in _thread_states(p2pd.pid)):  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0.01)
    monkeypatch.setattr(dht_node, "CALL_SECONDS", 0.3)
    with pytest.raises(PeerUnavailable, match="did not answer within 0 s"):
        await node.get("notes")
    node.shutdown()


PROGRAM = """
import signal, sys, time
import psutil
# Ignored by whatever a shell runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from swarm.machine.clock import SystemClock
from swarm.dht import node
running = node.start(clock=SystemClock(), host="127.0.0.1", initial_peers=sys.argv[1:])
try:
    [p2pd] = psutil.Process().children()
    print(p2pd.pid, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.2)
    print("p2pd is", "alive" if p2pd.status() != psutil.STATUS_ZOMBIE else "dead", flush=True)
    running.shutdown()
"""


def _p2pd_of(program: subprocess.Popen[str]) -> int:
    """The id of the program's p2pd, which it says once its node runs. On a busy machine it says before what it waits
    for."""
    assert program.stdout is not None
    return int(next(line for line in program.stdout if not line.startswith("waiting for ")))


def _program(first: DhtNode) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *first.addresses()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_kill_9_leaves_nothing(first: DhtNode) -> None:
    with _program(first) as program:
        p2pd = _p2pd_of(program)
        assert program.stdout is not None
        assert is_running(p2pd)
        os.kill(program.pid, signal.SIGKILL)
        wait_until_gone(p2pd)
        assert program.stdout.read() == ""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_ctrl_c_spares_p2pd_until_the_peer_has_said_goodbye(first: DhtNode) -> None:
    with _program(first) as program:
        p2pd = _p2pd_of(program)
        assert program.stdout is not None
        os.killpg(program.pid, signal.SIGINT)
        assert program.stdout.read() == "p2pd is alive\n"
        assert program.wait(30) == 0
        assert not is_running(p2pd)
