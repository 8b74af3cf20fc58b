"""The values that --announce accepts, and the addresses that are announced for them."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from peers.reach import listen as listening
from peers.reach.listen import (
    Candidates,
    Listen,
    Outside,
    candidates,
    own_address,
    own_candidates,
    own_outside,
    private_advice,
)
from peers.shared import cli
from peers.stage_peer.options import PeerOptions


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        ("203.0.113.7", Outside("203.0.113.7")),
        ("203.0.113.7:41001", Outside("203.0.113.7", 41001)),
        ("Peer.Example.org:1", Outside("peer.example.org", 1)),
        ("2001:db8::1", Outside("2001:db8::1")),
        ("[2001:DB8::1]", Outside("2001:db8::1")),
        ("[2001:db8::1]:65535", Outside("2001:db8::1", 65535)),
    ],
)
def test_a_host_and_perhaps_a_port(text: str, outside: Outside) -> None:
    assert Outside.parse(text, option="--announce") == outside


@pytest.mark.parametrize(
    "text", ["", ":5001", "host:", "host:0", "host:65536", "a b", "203.0.113.300", "1:2:3", "[x]:1"]
)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--announce takes HOST or HOST:PORT, by name or IP address .*, not '"):
        Outside.parse(text, option="--announce")


def test_others_are_told_the_outer_port_or_else_the_one_that_is_listened_on() -> None:
    outside = Outside("203.0.113.7", 41001), Outside("2001:db8::1")
    listen = Listen(host="", port=5001, outside=outside, dht_addresses=())
    assert listen.endpoints(5001) == ("203.0.113.7:41001", "[2001:db8::1]:5001")


def _options(*words: str) -> PeerOptions:
    return cli.parse(PeerOptions, prog="swarm-peer", argv=["--preset", "tiny", *words])


def test_without_a_port_it_counts_for_the_dht_as_well() -> None:
    assert _options("--announce", "203.0.113.7").outside_dht == (Outside("203.0.113.7"),)
    assert _options("--announce-dht", "203.0.113.7:41002").outside == ()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--announce 203.0.113.7:41001", "--announce HOST:PORT is for gRPC alone: give --announce-dht HOST:PORT"),
        ("--announce ::1 --host 0.0.0.0", "--announce ::1: with --host 0.0.0.0 this peer listens on IPv4 alone"),
        ("--announce 203.0.113.7 --host ::", "--announce 203.0.113.7: with --host :: this peer listens on IPv6 alone"),
        ("--announce-dht ::1 --host 0.0.0.0", "--announce-dht ::1: with --host 0.0.0.0"),
        ("--announce 127.0.0.1 --host 192.168.1.7", "--announce 127.0.0.1: this peer listens on 192.168.1.7 alone"),
        ("--announce 0.0.0.0", "--announce 0.0.0.0: this is no machine's address; give the one at which others"),
        ("--announce [::]:5001 --announce-dht 224.0.0.1", "--announce ::: this is no machine's address"),
        ("--port 5001 --metrics-port 5001", "--port and --metrics-port cannot both be 5001"),
        ("--announce a:b:c", "--announce takes HOST or HOST:PORT"),
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
    "words",
    [
        "--announce ::1",
        "--announce 203.0.113.7 --host 192.168.1.7",
        "--announce peer.example.org --host 0.0.0.0",
        "--announce [2001:db8::1]:41001 --announce-dht [2001:db8::1]:41002 --host 0.0.0.0",
        "--announce 127.0.0.1 --host 127.0.0.1",
    ],
    ids=["both are listened on", "a router forwards", "a name", "a mapped port", "this machine alone"],
)
def test_what_may_lead_somewhere_is_believed(words: str) -> None:
    assert _options(*words.split()).outside


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


@pytest.mark.parametrize(
    ("endpoints", "is_private"),
    [
        (["192.168.1.7:5001", "[fd00::7]:5001"], True),
        (["127.0.0.1:5001"], True),
        (["203.0.113.7:5001", "192.168.1.7:5001"], False),
        (["peer.example:5001"], False),
        (["100.64.0.7:5001"], False),
        ([], False),
    ],
    ids=["a home", "this machine", "a forwarded port", "a name", "a VPN", "nothing is announced"],
)
def test_addresses_that_only_the_own_network_reaches_are_told_with_what_to_do(
    endpoints: list[str], is_private: bool
) -> None:
    advice = private_advice(endpoints)
    assert bool(advice) is is_private
    assert not advice or "forward the TCP port in the router" in advice


def test_one_port_for_both_is_announced_once() -> None:
    options = _options("--port", "5001", "--dht-port", "5001", "--announce", "203.0.113.7:41001")
    assert options.shares_port
    assert options.outside == options.outside_dht == (Outside("203.0.113.7", 41001),)


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
        (["192.168.1.7"], ["10.9.0.7"], ["192.168.1.7", "10.9.0.7"]),
        (["172.17.0.1"], ["192.168.1.7"], ["192.168.1.7", "10.9.0.7"]),
        (["127.0.0.1"], ["10.9.0.7"], ["10.9.0.7", "192.168.1.7"]),
        ([], [], ["192.168.1.7", "10.9.0.7"]),
    ],
    ids=[
        "first peer",
        "over the VPN",
        "a VPN for all else",
        "a peer in a container",
        "a peer on this machine",
        "offline",
    ],
)
def test_the_way_to_others_decides_and_no_container_s_bridge_is_named(
    towards: Sequence[str], by_default: Sequence[str], hosts: Sequence[str]
) -> None:
    found = candidates("0.0.0.0", LAPTOP, towards_peers=towards, by_default=by_default)
    assert list(found.hosts) == hosts


@pytest.mark.parametrize(
    ("host", "towards", "by_default", "hosts"),
    [
        ("", [], ["192.168.1.7", "2001:db8:1::7"], ["192.168.1.7", "2001:db8:1::7", "10.9.0.7"]),
        ("", ["2001:db8:1::7"], ["192.168.1.7"], ["2001:db8:1::7", "192.168.1.7", "10.9.0.7"]),
        ("::", [], [], ["2001:db8:1::7"]),
        ("0.0.0.0", ["2001:db8:1::7"], ["192.168.1.7"], ["192.168.1.7", "10.9.0.7"]),
    ],
    ids=["both", "both, over IPv6", "IPv6 alone", "IPv4 alone"],
)
def test_of_the_versions_that_it_listens_to(
    host: str, towards: Sequence[str], by_default: Sequence[str], hosts: Sequence[str]
) -> None:
    assert list(candidates(host, LAPTOP, towards_peers=towards, by_default=by_default).hosts) == hosts


def test_a_machine_with_ipv6_alone_announces_that() -> None:
    interfaces = {"lo": ["127.0.0.1", "::1"], "eth0": ["2001:db8:1::7", "fe80::7"]}
    found = candidates("", interfaces, towards_peers=[], by_default=["2001:db8:1::7"])
    assert found.hosts == ("2001:db8:1::7",)


@pytest.mark.parametrize("host", ["127.0.0.1", "172.17.0.1", "10.9.0.7"])
def test_an_address_that_was_chosen_to_listen_on_is_announced(host: str) -> None:
    found = candidates(host, LAPTOP, towards_peers=["192.168.1.7"], by_default=["192.168.1.7"])
    assert found == Candidates((host,), is_decided=True)


@pytest.mark.parametrize(
    ("interfaces", "by_default", "hosts"),
    [
        ({"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"]}, [], ["127.0.0.1"]),
        ({"lo": ["127.0.0.1"], "bridge100": ["172.17.0.1"], "eth0": ["192.168.1.7"]}, [], ["192.168.1.7"]),
        ({"lo": ["127.0.0.1"], "br-lan": ["192.168.8.1"]}, ["192.168.8.1"], ["192.168.8.1"]),
        ({"lo": ["127.0.0.1"], "eth0": ["172.17.0.2"]}, ["172.17.0.2"], ["172.17.0.2"]),
    ],
    ids=["nothing else", "Docker's address", "a bridge that carries the default way", "in a container"],
)
def test_a_bridge_is_what_it_is_used_for(
    interfaces: Mapping[str, Sequence[str]], by_default: Sequence[str], hosts: Sequence[str]
) -> None:
    found = candidates("0.0.0.0", interfaces, towards_peers=[], by_default=by_default)
    assert list(found.hosts) == hosts
    assert found.is_decided


@pytest.mark.parametrize(
    ("towards", "by_default", "is_decided"),
    [([], [], False), (["127.0.0.1"], [], False), ([], ["10.9.0.7"], True), (["192.168.1.7"], [], True)],
)
def test_where_nothing_decides_the_candidates_are_listed(
    towards: Sequence[str], by_default: Sequence[str], is_decided: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = candidates("0.0.0.0", LAPTOP, towards_peers=towards, by_default=by_default)
    assert found.is_decided is is_decided
    monkeypatch.setattr(listening, "own_candidates", lambda *_: found)
    with caplog.at_level(logging.WARNING):
        own_outside("0.0.0.0", [], is_named=True)
        own_outside("0.0.0.0", [], is_named=False)
    said = [record.getMessage() for record in caplog.records]
    assert said == [] if is_decided else [
        "this machine has no default route and several addresses: 192.168.1.7, 10.9.0.7; others are told 192.168.1.7 "
        "first. If they reach it by another one, give --announce HOST"
    ]  # fmt: skip


# -- this machine ------------------------------------------------------------------------------------------------------

NODE_ID = 46 * "Q"


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert own_address("127.0.0.1", 9, 4) == "127.0.0.1"
    assert own_address("127.0.0.1", 9, 6) is None
    assert own_candidates("0.0.0.0", [f"/ip4/127.0.0.1/tcp/9/p2p/{NODE_ID}"]).hosts


def test_what_is_no_address_is_left_to_the_dht_node() -> None:
    """The DHT node refuses it in one line."""
    assert own_candidates("myhost", []).hosts == ()
    node = f"/ip4/127.0.0.1/tcp/1/p2p/{NODE_ID}"
    assert own_candidates("127.0.0.1", ["x", node]) == own_candidates("127.0.0.1", [node])


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
