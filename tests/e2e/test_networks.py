"""Peers in networks of their own: ports that a cloud maps, several interfaces, IPv6 alone. Each joins by an invite."""

import subprocess

import pytest

from scripts.benches.shared.internet import Host, Internet
from tests.support.nat_swarm import INTERNET, NatSwarm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, *INTERNET]


def _on(host: Host, *commands: str) -> None:
    for command in commands:
        subprocess.run(host.command(command.split()), check=True, timeout=30)


def test_a_cloud_that_maps_ports(internet: Internet, swarm: NatSwarm) -> None:
    """Outer 41001 and 41002 lead to inner 5001 and 5002; the peer behind them begins the run."""
    home, cloud = internet.public_host(), internet.host("restricted")
    router = internet.router_of(cloud)
    for outer, inner in ((41001, 5001), (41002, 5002)):
        _on(router, f"nft add rule ip nat pre iifname wan tcp dport {outer} dnat to {cloud.address}:{inner}")
    swarm.first_options = [
        "--port", "5001", "--dht-port", "5002", "--announce", f"{router.address}:41001",
        "--announce-dht", f"{router.address}:41002",
    ]  # fmt: skip
    ready = swarm.start_peer_on(cloud, 0).ready
    assert ready["endpoint"] == f"{router.address}:41001"
    assert ready["dht_addresses"][0].startswith(f"/ip4/{router.address}/tcp/41002/p2p/")
    swarm.start_peer_on(home, 1)
    swarm.train_on(home, 1)


def test_of_several_interfaces_the_one_on_the_way_to_the_others_is_announced(
    internet: Internet, swarm: NatSwarm
) -> None:
    """There is a bridge as well, and all else goes through a VPN."""
    first, several = internet.public_host(has_ipv6=False), internet.public_host(has_ipv6=False)
    _on(
        several, "ip link add docker0 type bridge", "ip addr add 172.17.0.1/16 dev docker0", "ip link set docker0 up",
        "ip link add tun0 type veth peer name far", "ip addr add 10.8.0.2/24 dev tun0", "ip link set far up",
        "ip link set tun0 up", "ip route add default via 10.8.0.1",
    )  # fmt: skip
    swarm.start_peer_on(first, 0)
    ready = swarm.start_peer_on(several, 1).ready
    assert ready["endpoint"].startswith(f"{several.address}:")
    assert ready["dht_addresses"][0].startswith(f"/ip4/{several.address}/")
    assert not any("172.17.0.1" in address for address in ready["dht_addresses"])
    swarm.train_on(first, 1)


def test_ipv6_alone(internet: Internet, swarm: NatSwarm) -> None:
    """IPv6 needs no option."""
    hosts = internet.public_host(), internet.public_host()
    for stage, host in enumerate(hosts):
        _on(host, f"ip addr del {host.address}/26 dev eth0")
        assert swarm.start_peer_on(host, stage).ready["endpoint"].startswith(f"[{host.address6}]:")
    swarm.train_on(hosts[1], 1)
