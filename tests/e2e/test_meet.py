"""A run of people who are all behind routers: it is begun at a swarm-meet, of which one port is open."""

import itertools
import subprocess

import pytest

from scripts.benches.shared.internet import Host, Internet
from tests.support.nat_swarm import INTERNET, NatSwarm
from tests.support.swarm import wait_until

PORT = 443

pytestmark = [pytest.mark.e2e, pytest.mark.slow, *INTERNET]


def start_meet(host: Host, internet: Internet, swarm: NatSwarm) -> str:
    """Start swarm-meet on a host with one open port, and return its address as it prints that."""
    internet.close_but(host, PORT)
    own = ["--announce", host.address, "--identity", str(swarm.folder / "meet.pem")]
    child = swarm.start_on(host, "meet", "meet", *own)
    wait_until(lambda: "begin a run:" in child.log.read_text(), 60.0, "swarm-meet")
    return child.log.read_text().split("--meet ")[1].split()[0]


def test_two_peers_behind_routers_train_and_go_on_when_the_outer_address_of_one_changes(
    internet: Internet, swarm: NatSwarm
) -> None:
    public, moving = internet.public_host(), internet.host("restricted")
    swarm.begin_at = start_meet(public, internet, swarm)
    homes = [internet.host("restricted"), moving]
    for stage, home in enumerate(homes):
        peer = swarm.start_peer_on(home, stage)
        assert peer.ready["endpoint"] == f"tunnel:{swarm.begin_at}"
        assert swarm.serves_seconds[-1] < 30.0
    trainer = swarm.start_trainer_on(homes[0])
    swarm.wait_for_steps("trainer", 5, swarm.start_seconds)
    assert swarm.answers_from(homes[1])["peer-2"]["forwards"]
    internet.readdress(moving)
    swarm.wait_for_more("trainer", 6)
    swarm.interrupt(trainer)
    swarm.assert_proven()


def test_a_first_peer_whose_router_does_not_lead_back_to_itself_trains_with_one_behind_another_router(
    internet: Internet, swarm: NatSwarm
) -> None:
    """Both ports of the first peer are forwarded by hand and announced. Its trainer is on the same machine."""
    first = internet.host("full-cone")
    swarm.first_options = ["--port", "5001", "--dht-port", "5002", "--announce", internet.router_of(first).address]
    peer = swarm.start_peer_on(first, 0)
    assert peer.ready["other_endpoints"] == [f"{first.address}:5001"]
    joiner = swarm.start_peer_on(internet.host("symmetric"), 1)
    assert joiner.ready["endpoint"].startswith("tunnel:")
    swarm.train_on(first, 5)
    assert swarm.answers_from(first)["peer-2"]["forwards"]
    swarm.assert_proven()


def test_the_only_peer_of_a_stage_is_found_again_when_the_address_of_its_machine_changes(
    internet: Internet, swarm: NatSwarm
) -> None:
    swarm.start_peer_on(internet.public_host(), 0)
    moving = internet.public_host(has_ipv6=False)
    swarm.start_peer_on(moving, 1)
    trainer = swarm.start_trainer_on(internet.public_host())
    swarm.wait_for_steps("trainer", 5, swarm.start_seconds)
    internet.readdress(moving)
    swarm.wait_for_more("trainer", 6, 75.0)
    swarm.interrupt(trainer)
    swarm.assert_proven()


def test_peers_with_one_open_port_each_join_and_train(internet: Internet, swarm: NatSwarm) -> None:
    """gRPC and the DHT share it. The second peer finds the run, and both are dialled back, at that port alone."""
    hosts = [internet.public_host(), internet.public_host()]
    swarm.options = ["--port", str(PORT), "--dht-port", str(PORT)]
    for stage, host in enumerate(hosts):
        internet.close_but(host, PORT)
        peer = swarm.start_peer_on(host, stage)
        assert peer.ready["endpoint"] == f"{host.address}:{PORT}"
        assert any(f"/ip4/{host.address}/tcp/{PORT}/" in address for address in peer.ready["dht_addresses"])
    swarm.train_on(internet.host("restricted"), 5)
    rows = swarm.answers_from(hosts[0])
    assert [row["reached"] for row in rows.values()] == ["direct", "direct"]
    swarm.assert_proven()


def test_where_only_port_443_leaves_one_peer_with_everything_there_lets_others_join(
    internet: Internet, swarm: NatSwarm
) -> None:
    first, second, home = internet.public_host(), internet.public_host(), internet.host("restricted")
    rule = f"type filter hook forward priority 0\nct state new tcp dport != {PORT} drop\n"
    building = internet.router_of(home).command(["nft", "-f", "-"])
    subprocess.run(building, input=f"table inet few {{ chain out {{\n{rule}}}\n}}\n", text=True, check=True)
    swarm.options = ["--port", str(PORT), "--dht-port", "8443"]
    swarm.start_peer_on(first, 0)

    numbers = itertools.count()

    def doctor() -> str:
        child = swarm.start_on(home, f"doctor-{next(numbers)}", "doctor", swarm.invite)
        swarm.wait_for_end(child)
        return next(line for line in child.log.read_text().splitlines() if line.startswith("DHT  "))

    alone = doctor()
    assert alone.split()[1] == "wrong"
    assert f"no node of the run's DHT answers at {first.address}:8443" in alone
    swarm.options = ["--port", str(PORT), "--dht-port", str(PORT)]
    swarm.start_peer_on(second, 1)
    wait_until(lambda: "1 of 2 nodes of the run's DHT answer" in doctor(), 60.0, "a node that answers")
    swarm.options = []
    peer = swarm.start_peer_on(home, 0)
    assert peer.ready["endpoint"].startswith("tunnel:")
    swarm.train_on(home, 3)
    swarm.assert_proven()
