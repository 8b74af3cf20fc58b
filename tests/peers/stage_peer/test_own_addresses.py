"""Which of a machine's addresses a peer announces."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from peers.stage_peer.own_addresses import announced_hosts, own_address, own_hosts

LAPTOP = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "br-5f3a9c0d1e2b": ["172.18.0.1"],
    "wlan0": ["192.168.1.7", "2001:db8:1::7", "fe80::7"],
    "veth12": ["169.254.3.4"],
    "wg0": ["10.9.0.7"],
    "virbr0": ["192.168.122.1"],
}


@pytest.mark.parametrize(
    ("towards", "by_default", "hosts"),
    [
        ([], "192.168.1.7", ["192.168.1.7", "10.9.0.7", "127.0.0.1"]),
        (["10.9.0.7"], "192.168.1.7", ["10.9.0.7", "192.168.1.7", "127.0.0.1"]),
        (["172.17.0.1"], "192.168.1.7", ["192.168.1.7", "10.9.0.7", "127.0.0.1"]),
        (["127.0.0.1"], "10.9.0.7", ["10.9.0.7", "192.168.1.7", "127.0.0.1"]),
        ([], None, ["192.168.1.7", "10.9.0.7", "127.0.0.1"]),
    ],
    ids=["first peer", "over the VPN", "a peer in a container", "a peer on this machine", "offline"],
)
def test_the_way_to_others_decides_and_no_container_s_bridge_is_named(
    towards: Sequence[str], by_default: str | None, hosts: Sequence[str]
) -> None:
    assert announced_hosts("0.0.0.0", LAPTOP, towards_peers=towards, by_default=by_default) == hosts


def test_of_the_version_that_it_listens_to() -> None:
    assert announced_hosts("::", LAPTOP, towards_peers=[], by_default=None) == ["2001:db8:1::7", "::1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "172.17.0.1", "10.9.0.7"])
def test_an_address_that_was_chosen_to_listen_on_is_announced(host: str) -> None:
    assert announced_hosts(host, LAPTOP, towards_peers=["192.168.1.7"], by_default="192.168.1.7") == [host]


@pytest.mark.parametrize(
    ("interfaces", "by_default", "hosts"),
    [
        ({"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"]}, None, ["127.0.0.1"]),
        ({"lo": ["127.0.0.1"], "br-lan": ["192.168.8.1"]}, "192.168.8.1", ["192.168.8.1", "127.0.0.1"]),
        ({"lo": ["127.0.0.1"], "eth0": ["172.17.0.2"]}, "172.17.0.2", ["172.17.0.2", "127.0.0.1"]),
    ],
    ids=["nothing else", "a bridge that carries the default way", "in a container"],
)
def test_a_bridge_is_what_it_is_used_for(
    interfaces: Mapping[str, Sequence[str]], by_default: str | None, hosts: Sequence[str]
) -> None:
    assert announced_hosts("0.0.0.0", interfaces, towards_peers=[], by_default=by_default) == hosts


# -- this machine ------------------------------------------------------------------------------------------------------


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert own_address("127.0.0.1", 9, 4) == "127.0.0.1"
    assert own_address("127.0.0.1", 9, 6) is None
    assert own_hosts("0.0.0.0", ["/ip4/127.0.0.1/tcp/9/p2p/Qm"])[-1] == "127.0.0.1"


def test_what_is_no_address_is_left_to_who_listens_there() -> None:
    assert own_hosts("myhost", []) == []


NETWORK = """
ip link set lo up
ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up
ip link add eth0 type veth peer name far && ip addr add 198.18.0.2/24 dev eth0
ip link add vpn type veth peer name farther && ip addr add 10.9.0.7/24 dev vpn
for name in eth0 far vpn farther; do ip link set $name up; done
"""
DEFAULT_ROUTE = "ip route add default via 198.18.0.1"
ASK = """
import json, sys
from peers.stage_peer.own_addresses import own_hosts
print(json.dumps(own_hosts("0.0.0.0", sys.argv[1:])))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("ip")), reason="needs unshare and ip"
)
@pytest.mark.parametrize(
    ("initial_peers", "route", "first"),
    [
        ([], DEFAULT_ROUTE, "198.18.0.2"),
        (["10.9.0.1"], DEFAULT_ROUTE, "10.9.0.7"),
        (["172.17.0.5"], DEFAULT_ROUTE, "198.18.0.2"),
        (["198.18.0.5"], "", "198.18.0.2"),
        (["172.17.0.5", "10.9.0.1"], "", "10.9.0.7"),
    ],
)
def test_in_a_network_of_its_own_the_kernel_s_routes_decide(
    initial_peers: Sequence[str], route: str, first: str
) -> None:
    addresses = [f"/ip4/{peer}/tcp/4001/p2p/Qm" for peer in initial_peers]
    script = f'{NETWORK}\n{route}\nexec "$@"'
    result = subprocess.run(
        ["unshare", "--net", "--map-root-user", "sh", "-ec", script, "sh", sys.executable, "-c", ASK, *addresses],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if result.returncode != 0 and "unshare failed" in result.stderr + result.stdout:
        pytest.skip(f"no network namespaces here: {result.stderr}")
    assert result.returncode == 0, result.stderr
    hosts = json.loads(result.stdout)
    assert hosts[0] == first
    assert sorted(hosts) == ["10.9.0.7", "127.0.0.1", "198.18.0.2"]


def test_what_is_no_address_is_left_to_the_dht_node() -> None:
    """Which says so in one line."""
    assert own_hosts("127.0.0.1", ["x", "/ip4/127.0.0.1/tcp/1/p2p/x"]) == own_hosts(
        "127.0.0.1", ["/ip4/127.0.0.1/tcp/1/p2p/x"]
    )
