"""Multiaddresses, and ports that are not free."""

import socket

import pytest

from scripts.benches.shared.ports import free_ports
from swarm.dht import addresses

PEER_ID = "12D3KooWJGb1V4MhumFes4HqVJKRZrs8qZcyMBtgrNRXUpPo3sN1"


@pytest.mark.parametrize(
    "endpoint", ["/ip4/192.0.2.1/tcp/4001", "/ip6/2001:db8::1/tcp/1", "/dns/a-b.example/tcp/65535"]
)
def test_an_address_is_a_place_and_an_id(endpoint: str) -> None:
    assert addresses.split(f"{endpoint}/p2p/{PEER_ID}") == (endpoint, PEER_ID)


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
        f"/ip4/192.0.2.1/udp/4001/p2p/{PEER_ID}",
        "/ip4/192.0.2.1/tcp/4001/p2p/0OIl",
        f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER_ID}\n",
    ],
)
def test_anything_else_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(ValueError, match=r"^'.*' is no address of a DHT node: copy .*$"):
        addresses.split(address)


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "/ip4/0.0.0.0/tcp/7"), ("::1", "/ip6/::1/tcp/7"), ("peer.example", "/dns/peer.example/tcp/7")],
)
def test_hosts_may_be_names(host: str, address: str) -> None:
    assert addresses.at(host, 7) == address


def test_a_port_is_free_or_not() -> None:
    (port,) = free_ports(1)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ValueError, match=rf"^the DHT cannot listen on .* {port}: .* host or port$"),
    ):
        addresses.require_free_port("127.0.0.1", port)
    assert addresses.require_free_port("127.0.0.1", port) == port
    assert addresses.require_free_port("127.0.0.1", 0) > 0


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70000)])
def test_impossible_places_are_refused(host: str, port: int) -> None:
    with pytest.raises(ValueError, match="cannot listen on"):
        addresses.require_free_port(host, port)


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
