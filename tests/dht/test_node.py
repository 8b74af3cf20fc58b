"""DHT nodes join, are found under their addresses, and end: real ones, with real p2pd processes."""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from scripts.benches.shared.ports import free_ports
from swarm.dht import node as dht_node
from swarm.dht.node import DhtNode
from swarm.errors import PeerUnavailable
from swarm.machine import waits
from swarm.machine.clock import SystemClock
from tests.dht.nodes import KEYS, OWNER, THIEF, Start, sealed_note, stranger_at

if TYPE_CHECKING:
    pass

NOBODY = "12D3KooWJGb1V4MhumFes4HqVJKRZrs8qZcyMBtgrNRXUpPo3sN1"


async def test_what_one_stores_all_can_read(first: DhtNode, second: DhtNode, client: DhtNode) -> None:
    expiration = time.time() + 30
    value = sealed_note("notes", expiration)
    by_client = sealed_note("notes", expiration, THIEF)
    assert await second.store("notes", OWNER.peer_id, value, expiration)
    assert await client.store("notes", THIEF.peer_id, by_client, expiration)
    for node in (first, second, client):
        found = await node.get("notes")
        assert found == {OWNER.peer_id: (value, expiration), THIEF.peer_id: (by_client, expiration)}
        for _ in range(3):
            assert await node.get("notes", partly=True) == found
    assert await first.get("nothing") == await first.get("nothing", partly=True) == {}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("/ip4/127.0.0.1/tcp/1/p2p/" + NOBODY, "check the address"),
        ("/dns/xn--none/tcp/1/p2p/" + NOBODY, "check the address"),
        ("{first}/p2p/" + NOBODY, "another peer answers there"),
    ],
)
def test_who_cannot_join_is_told_why(
    start: Start, first: DhtNode, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str,
    reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(waits, "JOIN_SECONDS", 0.3)
    address = address.format(first=first.addresses()[0].split("/p2p/")[0])
    with pytest.raises(PeerUnavailable, match=rf"^cannot join the DHT at {address}: {reason}") as caught:
        start([address])
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


async def test_a_client_is_in_the_dht_inside_its_block(first: DhtNode) -> None:
    async with dht_node.as_client(SystemClock(), first.addresses()) as client:
        client.belong_to(KEYS, None)
        assert await client.get("nothing") == {}
        assert client.addresses() == []
    with pytest.raises(PeerUnavailable, match="this peer has left the DHT"):
        await client.get("nothing")


async def test_a_client_that_is_told_to_stop_while_it_joins_ends_soon() -> None:
    """It would try for 25 seconds."""
    clock = SystemClock()
    began_at = clock.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), dht_node.as_client(clock, [f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"]):
            pass
    assert clock.monotonic() - began_at < 15.0


def test_those_that_start_at_the_same_moment_wait_for_each_other(start: Start, tmp_path: Path) -> None:
    """Each node is told all addresses, its own included. The node that begins the DHT starts last."""
    options: list[dict[str, Any]] = [
        {"identity_path": tmp_path / f"{number}.p2p", "port": port} for number, port in enumerate(free_ports(3))
    ]
    known = list[str]()
    for node in [start(**own) for own in options]:
        known += node.addresses()
        node.shutdown()
    with ThreadPoolExecutor() as pool:
        joiners = [pool.submit(start, known, **own) for own in options[1:]]
        time.sleep(0.5)
        first = start(**options[0])
        expiration = time.time() + 30
        value = sealed_note("notes", expiration)
        assert asyncio.run(first.store("notes", OWNER.peer_id, value, expiration))
        for joiner in joiners:
            node = joiner.result(timeout=30)
            asyncio.run(_until_found(node, "notes"))
            node.shutdown()
    first.shutdown()


def test_a_damaged_key_is_one_line(start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "libp2p.key"
    key.write_bytes(b"no key")
    with pytest.raises(OSError, match=r"^the DHT's process, p2pd, did not start: .+$"):
        start(identity_path=key)
    assert capfd.readouterr() == ("", "")


def test_a_restart_keeps_the_address(start: Start, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = {"identity_path": tmp_path / "state" / "libp2p.key", "announce": [("peer.example", 0)], "port": port}
    node = start(**options)
    node.shutdown()
    again = start(**options)
    assert again.addresses() == node.addresses()
    assert node.addresses()[0].startswith("/dns/peer.example/tcp/")
    again.shutdown()


async def test_a_node_that_has_become_a_client_can_become_the_node_that_it_was(start: Start, tmp_path: Path) -> None:
    witness = start()
    node = start(witness.addresses(), identity_path=tmp_path / "libp2p.key", port=free_ports(1)[0])
    before = node.addresses()
    assert before[0].split("/")[4] == str(node.port)
    await node.become(client_mode=True)
    assert node.addresses() == []
    await node.become(client_mode=False)
    assert node.addresses() == before
    # Another node joins there.
    for one in (start(before), node, witness):
        one.shutdown()


async def test_a_restarted_node_is_one_node_to_others(start: Start, tmp_path: Path) -> None:
    """As two nodes it would be sent every record twice, and would refuse the second copy."""
    witness = start()
    with stranger_at(witness) as observer:
        for number in range(2):
            node = start(witness.addresses(), identity_path=tmp_path / "libp2p.key")
            key, expiration = f"restart {number}", time.time() + 30
            assert await witness.store(key, OWNER.peer_id, sealed_note(key, expiration), expiration)
            [known] = observer.neighbours(witness.addresses()[0])
            assert node.addresses()[0].endswith(f"/p2p/{known}")
            node.shutdown()
    witness.shutdown()


async def _until_found(node: DhtNode, key: str) -> None:
    async with asyncio.timeout(20.0):
        found: object = None
        while not found:
            with contextlib.suppress(PeerUnavailable):
                found = await node.get(key)
