"""Multiaddresses, and ports that are not free."""

import socket

import pytest

from scripts.benches.shared.ports import free_ports
from swarm.dht import addresses

PEER_ID = "12D3KooWJGb1V4MhumFes4HqVJKRZrs8qZcyMBtgrNRXUpPo3sN1"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "192.0.2.1:4001",
        "/ip4/192.0.2.1/tcp/4001",
        f"/ip4/192.0.2.1/tcp/0/p2p/{PEER_ID}",
        f"/ip4/192.0.2.1/tcp/65536/p2p/{PEER_ID}",
        f"/ip4/192.0.2.300/tcp/4001/p2p/{PEER_ID}",
        f"/ip4/2001:db8::1/tcp/4001/p2p/{PEER_ID}",
        f"/ip6/fe80::1%eth0/tcp/4001/p2p/{PEER_ID}",
        f"/dns4/gpu_box/tcp/4001/p2p/{PEER_ID}",
        f"/ip4/192.0.2.1/udp/4001/p2p/{PEER_ID}",
        "/ip4/192.0.2.1/tcp/4001/p2p/0OIl",
        f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER_ID}\n",
    ],
)
def test_anything_else_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(ValueError, match=r"^'.*' is no address of a DHT node: copy .*$"):
        addresses.split(address)


def test_a_port_is_free_or_not() -> None:
    (port,) = free_ports(1)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ValueError, match=rf"^the DHT cannot listen on .* {port}: .* host or port$"),
    ):
        addresses.require_free_port("127.0.0.1", port)
    assert addresses.require_free_port("127.0.0.1", port) == port
    assert addresses.require_free_port("127.0.0.1", 0) > 0


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("203.0.113.7", True), ("2001:db8::1", True), ("gpu-box", True), ("gpu1.example.org", True),
        ("203.0.113.7:5001", False), ("203.0.113", False), ("http://x", False), ("gpu_box", False), ("", False),
        ("-x", False), ("a..b", False), ("x" * 64, False),
    ],
)  # fmt: skip
def test_what_can_be_announced_as_a_host(name: str, *, is_one: bool) -> None:
    assert addresses.is_host(name) == is_one
