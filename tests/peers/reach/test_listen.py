"""The values that --announce accepts, and the addresses that are announced for them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from peers.reach.listen import Listen, Outside, candidates
from peers.shared import cli
from peers.stage_peer.options import PeerOptions


@pytest.mark.parametrize(
    "text", ["", ":5001", "host:", "host:0", "host:65536", "a b", "203.0.113.300", "1:2:3", "[x]:1"]
)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--announce takes HOST or HOST:PORT, by name or IP address .*, not '"):
        Outside.parse(text, option="--announce")


def _options(*words: str) -> PeerOptions:
    return cli.parse(PeerOptions, prog="swarm-peer", argv=["--preset", "tiny", *words])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--announce 203.0.113.7:41001", "--announce HOST:PORT is for gRPC alone: give --announce-dht HOST:PORT"),
        ("--announce 203.0.113.7 --host ::", "--announce 203.0.113.7: with --host :: this peer listens on IPv6 alone"),
        ("--announce 127.0.0.1 --host 192.168.1.7", "--announce 127.0.0.1: this peer listens on 192.168.1.7 alone"),
        ("--announce 0.0.0.0", "--announce 0.0.0.0: this is no machine's address; give the one at which others"),
        ("--port 5001 --metrics-port 5001", "--port and --metrics-port cannot both be 5001"),
    ],
)
def test_what_leads_nowhere_is_refused_in_one_line(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _options(*words.split())
    error = capsys.readouterr().err
    assert error.startswith(f"swarm-peer: error: {complaint}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("reached", "behind"),
    [(["203.0.113.7:41001"], ("192.168.1.7:5001", "10.8.0.2:5001")), (["192.168.1.7:5001"], ())],
    ids=["through a router", "by its own address"],
)
def test_the_machine_s_own_addresses_stay_behind_those_at_which_others_reach_it(
    reached: list[str], behind: tuple[str, ...]
) -> None:
    own = tuple(map(Outside, ("192.168.1.7", "10.8.0.2", "10.9.0.2")))
    listen = Listen(host="", port=5001, outside=(Outside("203.0.113.7", 41001),), own=own, dht_addresses=())
    assert listen.behind(reached, 5001) == behind


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
        ([], ["192.168.1.7"], ["192.168.1.7", "10.9.0.7"]),
        (["10.9.0.7"], ["192.168.1.7"], ["10.9.0.7", "192.168.1.7"]),
        (["172.17.0.1"], ["192.168.1.7"], ["192.168.1.7", "10.9.0.7"]),
        (["127.0.0.1"], ["10.9.0.7"], ["10.9.0.7", "192.168.1.7"]),
    ],
    ids=[
        "first peer",
        "over the VPN",
        "a peer in a container",
        "a peer on this machine",
    ],
)
def test_the_way_to_others_decides_and_no_container_s_bridge_is_named(
    towards: Sequence[str], by_default: Sequence[str], hosts: Sequence[str]
) -> None:
    found = candidates("0.0.0.0", LAPTOP, towards_peers=towards, by_default=by_default)
    assert list(found.hosts) == hosts
    assert found.loopback == ("127.0.0.1",)


# -- this machine ------------------------------------------------------------------------------------------------------

NODE_ID = 46 * "Q"


NETWORK = """
ip link set lo up
ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up
ip link add eth0 type veth peer name far && ip addr add 198.18.0.2/24 dev eth0
ip link add vpn type veth peer name farther && ip addr add 10.9.0.7/24 dev vpn
for name in eth0 far vpn farther; do ip link set $name up; done
"""
IPV6_ALONE = """
ip link set lo up
ip link add eth0 type veth peer name far && ip addr add 2001:db8:1::7/64 dev eth0 nodad
for name in eth0 far; do ip link set $name up; done
ip -6 route add default via 2001:db8:1::1
"""
ASK = """
import json, sys
from peers.reach.listen import own_candidates
print(json.dumps(own_candidates("", sys.argv[1:]).hosts))
"""


def _hosts(network: str, *addresses: str) -> list[str]:
    """What a peer in its own network namespace announces if it joins at these addresses."""
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs unshare and ip")
    command = ["unshare", "--net", "--map-root-user", "sh", "-ec", f'{network}\nexec "$@"', "sh"]
    result = subprocess.run(
        [*command, sys.executable, "-c", ASK, *addresses], capture_output=True, text=True, timeout=60, check=False
    )
    if result.returncode != 0 and "unshare failed" in result.stderr + result.stdout:
        pytest.skip(f"no network namespaces here: {result.stderr}")
    assert result.returncode == 0, result.stderr
    hosts: list[str] = json.loads(result.stdout)
    return hosts


@pytest.mark.parametrize(
    ("initial_peers", "route", "first"),
    [
        (["198.18.0.5"], "ip route add default via 10.9.0.1", "198.18.0.2"),
        (["172.17.0.5", "10.9.0.1"], "", "10.9.0.7"),
    ],
)
def test_in_a_network_of_its_own_the_kernel_s_routes_decide(
    initial_peers: Sequence[str], route: str, first: str
) -> None:
    hosts = _hosts(f"{NETWORK}\n{route}", *(f"/ip4/{peer}/tcp/4001/p2p/{NODE_ID}" for peer in initial_peers))
    assert hosts[0] == first
    assert sorted(hosts) == ["10.9.0.7", "198.18.0.2"]


def test_in_a_network_of_ipv6_alone_that_is_announced() -> None:
    assert _hosts(IPV6_ALONE) == ["2001:db8:1::7"]
