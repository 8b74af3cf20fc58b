"""DHT nodes whose neighbours are gone, cut off, or made up: real nodes, with real p2pd processes."""

import asyncio
import contextlib
import time

import pytest

from swarm.dht import node as dht_node
from swarm.dht.node import DhtNode
from swarm.errors import PeerUnavailable
from tests.dht.nodes import OWNER, Start, p2pd_of, sealed_note, stranger_at
from tests.support.chain import PATIENCE_SECONDS


async def test_a_node_cannot_make_itself_many(start: Start) -> None:
    node = start()
    [address] = node.addresses()
    with stranger_at(node, is_client=False) as intruder, stranger_at(node) as observer:
        for number in range(10):
            intruder.greet_as(f"made up {number}", address)
        assert observer.neighbours(address) == [intruder.dht.libp2p_id]
    node.shutdown()


async def test_a_client_without_neighbours_knows_nothing(start: Start) -> None:
    """A client must not take silence for an empty DHT."""
    server = start()
    client = start(server.addresses(), client_mode=True)
    assert await client.get("notes") == {}
    server.shutdown()
    with pytest.raises(PeerUnavailable, match="no node of the DHT answers"):
        await client.get("notes")
    client.shutdown()


async def test_parted_nodes_find_each_other_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_node, "RECONNECT_SECONDS", 0.1)
    one, two = start(), start()
    wrong = f"/tcp/1/p2p/{two.addresses()[0].rpartition('/')[2]}"
    for host in ("/ip6/fe80::1%x", "/dns/no_name", "/dns/xn--none", "/dns/xn--other"):
        one.remember(["no address", f"{host}{wrong}"])
    one.remember([f"/ip4/127.0.0.1{wrong}", *two.addresses()])
    expiration = time.time() + 30
    value = sealed_note("parted", expiration)
    assert await two.store("parted", OWNER.peer_id, value, expiration)
    found: dict[str, tuple[bytes, float]] = {}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not found:
            with contextlib.suppress(PeerUnavailable):
                found = await one.get("parted")
            await asyncio.sleep(0.1)
    for node in (one, two):
        node.shutdown()


async def test_reading_partly_survives_the_node_that_was_asked(start: Start, first: DhtNode, second: DhtNode) -> None:
    third = start(first.addresses())
    reader = start(first.addresses(), client_mode=True)
    expiration = time.time() + 30
    value = sealed_note("survives", expiration)
    assert await reader.store("survives", OWNER.peer_id, value, expiration)
    assert await reader.get("survives", partly=True) == {OWNER.peer_id: (value, expiration)}
    third.shutdown()
    for _ in range(6):
        assert await reader.get("survives", partly=True) == {OWNER.peer_id: (value, expiration)}
    reader.shutdown()


async def _until_alone(node: DhtNode) -> None:
    """Read until the node says that no other node answers."""
    async with asyncio.timeout(30.0):
        with contextlib.suppress(PeerUnavailable):
            while True:
                await node.get("own")
    with pytest.raises(PeerUnavailable, match="no other node of the DHT answers"):
        await node.get("own")


async def _announce(node: DhtNode, lifetime_seconds: float) -> dict[str, tuple[bytes, float]]:
    expiration = time.time() + lifetime_seconds
    value = sealed_note("own", expiration)
    assert await node.store("own", OWNER.peer_id, value, expiration)
    return {OWNER.peer_id: (value, expiration)}


async def test_a_node_without_neighbours_does_not_take_its_own_records_for_all(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That changes once the others have been gone for so long that it must be the only one left."""
    left = start()
    left.remember(left.addresses())
    own = await _announce(left, 40.0)
    assert await left.get("own") == own, "it is the first, and remembers only itself"
    client, other = start(left.addresses(), client_mode=True), start(left.addresses())
    left.remember(other.addresses())
    assert await left.get("own") == own
    other.shutdown()
    await _until_alone(left)
    own = await _announce(left, 50.0)
    assert await client.get("own") == own, "a client finds it"
    newcomer = start(left.addresses())
    assert await newcomer.get("own") == await left.get("own") == own
    newcomer.shutdown()
    await _until_alone(left)
    monkeypatch.setattr(dht_node, "ALONE_SECONDS", 0.5)
    await asyncio.sleep(0.6)
    assert await left.get("own") == own
    for node in (client, left):
        node.shutdown()


@pytest.mark.slow
async def test_a_node_that_is_cut_off_does_not_take_its_own_records_for_an_answer_and_is_soon_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must notice that although it knows of others and has asked them a moment ago."""
    monkeypatch.setattr(dht_node, "LONELY_SECONDS", 0.1)
    left = start()
    others = [start(left.addresses()) for _ in range(2)]
    for other in others:
        left.remember(other.addresses())
    own = await _announce(left, 40.0)
    assert await left.get("own", partly=True) == own
    for other in others:
        p2pd_of(other).suspend()
    with contextlib.suppress(PeerUnavailable):
        await left.get("own")
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        with pytest.raises(PeerUnavailable):
            await left.get("own", partly=True)
    for other in others:
        p2pd_of(other).resume()
    # If it did not ask them again by itself, it would be back only when one of them asks it, minutes later.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(PeerUnavailable):
                if await left.get("own", partly=True) == own:
                    break
            await asyncio.sleep(0.1)
    for node in (left, *others):
        node.shutdown()
