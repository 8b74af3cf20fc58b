"""Peers behind routers, on a small internet of network namespaces: they serve, train and average like all others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared.internet import Internet, missing
from tests.support.nat_swarm import NatSwarm
from tests.support.swarm import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there"),
]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "logs", grace_seconds=0.0) as children:
        yield children


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as internet:
        yield internet


def test_a_peer_behind_a_router_serves_trains_and_averages(
    internet: Internet, children: Supervisor, tmp_path: Path
) -> None:
    public, hidden = internet.public_host(), internet.host("restricted")
    swarm = NatSwarm(tmp_path, children, num_stages=1)
    swarm.start_peer_on(public, 0)
    peer = swarm.start_peer_on(hidden, 0)
    assert peer.ready["endpoint"].startswith("tunnel:")
    assert peer.ready["dht_addresses"] == []
    trainer = swarm.start_trainer_on(internet.public_host(), "trainer", steps=4)
    assert swarm.wait_for_end(trainer) == 0
    rows = swarm.status_from(public)
    assert [rows[name]["reached"] for name in ("peer-1", "peer-2")] == ["direct", "punched"]
    assert rows["peer-1"]["members"] == rows["peer-2"]["members"] == 2
    assert rows["peer-2"]["forwards"]
    assert "others reach this peer by way of further peers alone" in peer.child.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "ways"),
    [
        (["full-cone"], ["direct"]),
        (["symmetric"], ["punched"]),
        (["cgnat"], ["punched"]),
        (["udp-blocked"], ["punched"]),
        (["ipv6"], ["punched"]),
        (["ipv6", "ipv6"], ["punched", "punched"]),
        (["ipv6", "dual-stack"], ["punched", "punched"]),
        (["restricted", "restricted"], ["punched", "punched"]),
        # As a public host sees them; such peers reach each other through a relay.
        (["symmetric", "symmetric"], ["punched", "punched"]),
        (["symmetric", "cgnat"], ["punched", "punched"]),
    ],
)
def test_every_kind_of_connection_will_do(
    internet: Internet, children: Supervisor, tmp_path: Path, kinds: list[str], ways: list[str]
) -> None:
    """Stage 0 has a public peer, and stage 1 one peer for each kind; the trainer is behind such a router, too."""
    public = internet.public_host()
    swarm = NatSwarm(tmp_path, children, num_stages=2)
    swarm.start_peer_on(public, 0)
    for kind in kinds:
        swarm.start_peer_on(internet.host(kind), 1)
    trainer = swarm.start_trainer_on(internet.host(kinds[-1]), "trainer", steps=6)
    assert swarm.wait_for_end(trainer) == 0
    rows = swarm.status_from(public)
    assert [rows[f"peer-{number}"]["reached"] for number in range(2, len(kinds) + 2)] == ways
    assert all(rows[f"peer-{number}"]["members"] == len(kinds) for number in range(2, len(kinds) + 2))
    assert swarm.audit()["proven"]


@pytest.mark.slow
def test_peers_with_ipv4_alone_and_peers_with_ipv6_alone_train_together_through_one_that_has_both(
    internet: Internet, children: Supervisor, tmp_path: Path
) -> None:
    """The only peer of stage 0 has IPv4, those of stage 1 have both and IPv6, and the trainer has IPv6."""
    both = internet.public_host()
    swarm = NatSwarm(tmp_path, children, num_stages=2)
    swarm.start_peer_on(both, 1)
    old = swarm.start_peer_on(internet.public_host(has_ipv6=False), 0)
    assert not old.ready["endpoint"].startswith("tunnel:")
    new = swarm.start_peer_on(internet.host("ipv6"), 1)
    assert new.ready["endpoint"].startswith("tunnel:")
    trainer = swarm.start_trainer_on(internet.host("ipv6"), "trainer", steps=6)
    assert swarm.wait_for_end(trainer) == 0
    rows = swarm.status_from(both)
    assert rows["peer-2"]["forwards"]
    assert rows["peer-3"]["forwards"]
    assert swarm.audit()["proven"]


@pytest.mark.slow
def test_a_relay_that_is_killed_costs_a_re_route_and_no_sample(
    internet: Internet, children: Supervisor, tmp_path: Path
) -> None:
    swarm = NatSwarm(tmp_path, children, num_stages=2)
    public = [internet.public_host() for _ in range(3)]
    for host in public:
        swarm.start_peer_on(host, 0)
    # Two of them, of which neither can punch a way to the other.
    for _ in range(2):
        swarm.start_peer_on(internet.host("symmetric"), 1)
    trainer = swarm.start_trainer_on(internet.host("symmetric"), "trainer", steps=30)
    swarm.wait_for_steps("trainer", 5)
    carriers = [name for name, row in swarm.status_from(public[0]).items() if row["carried_bytes"]]
    assert carriers
    victim = next(peer for peer in swarm.peers if peer.child.name == carriers[-1])
    before = len(swarm.steps("trainer"))
    swarm.kill(victim)
    wait_until(lambda: len(swarm.steps("trainer")) > before + 2, 30.0, "training to go on")
    assert swarm.wait_for_end(trainer) == 0
    report = swarm.audit()
    assert report["proven"], report
