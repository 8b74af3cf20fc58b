"""A node of the DHT that others cannot reach at first, but later can."""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import cast

from peers.reach.listen import Listen, Outside
from peers.reach.own_port import DhtReach
from scripts.benches.shared.ports import free_ports
from swarm.dht.node import DhtNode
from swarm.rpc.meeting.check import MULTISTREAM

NODE_ID = "12D3KooWGRUVh6WhGUE1NEHGbHPhc3nCWzYLWvQYYTLvMaFRRxMH"


@dataclass
class Node:
    """A node that records whether it became a client."""

    was: list[str] = field(default_factory=list)
    can_start: bool = True

    async def become(self, *, client_mode: bool) -> None:
        """Do as DhtNode does."""
        if not self.can_start:
            raise OSError("p2pd does not start")
        self.was.append("client" if client_mode else "asked")


def _reach(node: Node, port: int, *, outer_port: int = 0) -> DhtReach:
    listen = Listen(
        host="127.0.0.1", port=0, outside=(Outside("127.0.0.1"),), dht_port=port,
        dht_addresses=(f"/ip4/192.0.2.1/tcp/{outer_port or port}/p2p/{NODE_ID}",),
    )  # fmt: skip
    return DhtReach(cast(DhtNode, node), listen)


async def _greeting(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_while_the_node_is_a_client_its_port_is_answered_for_those_that_dial_back() -> None:
    node, (port,) = Node(), free_ports(1)
    reach = _reach(node, port)
    await reach.conclude([])
    async with reach.answering(None) as endpoints:
        assert endpoints == [f"192.0.2.1:{port}", f":{port}"]
        assert await _greeting(port) == MULTISTREAM
    await reach.conclude([f"198.51.100.1:{port}"])
    assert node.was == ["client", "asked"]
    assert reach.addresses == (f"/ip4/198.51.100.1/tcp/{port}/p2p/{NODE_ID}",)
    async with reach.answering(None) as endpoints:
        assert endpoints == [f"198.51.100.1:{port}", f":{port}"]


async def test_nobody_is_asked_to_dial_a_port_that_another_process_has_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        reach = _reach(Node(), taken.getsockname()[1])
        await reach.conclude([])
        async with reach.answering(None) as endpoints:
            assert endpoints == []


async def test_a_node_that_does_not_start_again_is_announced_to_nobody() -> None:
    node = Node()
    reach = _reach(node, *free_ports(1))
    await reach.conclude([])
    node.can_start = False
    await reach.conclude(["192.0.2.1:5002"])
    assert reach.addresses == ()
