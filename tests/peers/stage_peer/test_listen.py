"""The values that --announce accepts, and the addresses that are announced for them."""

import pytest

from peers.shared import cli
from peers.stage_peer.listen import Listen, Outside, private_advice
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


def test_each_has_an_option_of_its_own() -> None:
    words = ["--announce", "203.0.113.7", "--announce", "2001:db8::1", "--announce-dht", "peer.example.org:41002"]
    options = _options(*words)
    assert options.outside == (Outside("203.0.113.7"), Outside("2001:db8::1"))
    assert options.outside_dht == (Outside("peer.example.org", 41002),)
    assert cli.arguments(options) == ["--preset", "tiny", *words]


def test_an_invite_comes_without_an_option() -> None:
    options = cli.parse(PeerOptions, prog="swarm-peer", argv=["--threads", "1", "swarm://1x"])
    assert cli.arguments(options) == ["swarm://1x", "--threads", "1"]
    assert options.first_stage == "auto"


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
        ("--threads 1025", "--threads must be between 0 and 1024, not 1025"),
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
