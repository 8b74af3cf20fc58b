"""Peers behind routers, on a small internet of network namespaces: they serve, train and average like all others."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.parity import train_reference
from scripts.benches.shared.common import with_corpus
from scripts.benches.shared.internet import Host, Internet
from scripts.benches.sides.reference import Reference
from swarm.config.reading import load
from tests.support.nat_swarm import INTERNET, NatSwarm
from tests.support.swarm import wait_until

pytestmark = [pytest.mark.e2e, *INTERNET]


def nft(host: Host, rules: str) -> None:
    """Set rules in the packet filter of a host."""
    subprocess.run(host.command(["nft", "-f", "-"]), input=rules, text=True, check=True)


def test_a_peer_behind_a_router_serves_trains_and_averages(
    internet: Internet, children: Supervisor, tmp_path: Path
) -> None:
    public, hidden = internet.public_host(), internet.host("restricted")
    swarm = NatSwarm(tmp_path, children, num_stages=1)
    swarm.start_peer_on(public, 0)
    peer = swarm.start_peer_on(hidden, 0)
    assert peer.ready["endpoint"].startswith("tunnel:")
    assert peer.ready["dht_addresses"] == []
    swarm.train_on(internet.public_host(), 4)
    rows = swarm.answers_from(public)
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
        # These are the ways that a public host uses. Such peers reach each other through a relay.
        (["symmetric", "symmetric"], ["punched", "punched"]),
        (["symmetric", "cgnat"], ["punched", "punched"]),
    ],
)
def test_every_kind_of_connection_will_do(
    internet: Internet, swarm: NatSwarm, kinds: list[str], ways: list[str]
) -> None:
    """Stage 0 has a public peer, and stage 1 one peer for each kind; the trainer is behind such a router, too."""
    public = internet.public_host()
    swarm.start_peer_on(public, 0)
    for kind in kinds:
        swarm.start_peer_on(internet.host(kind), 1)
    swarm.train_on(internet.host(kinds[-1]), 6)
    rows = swarm.answers_from(public)
    assert [rows[f"peer-{number}"]["reached"] for number in range(2, len(kinds) + 2)] == ways
    assert all(rows[f"peer-{number}"]["members"] == len(kinds) for number in range(2, len(kinds) + 2))
    swarm.assert_proven()


@pytest.mark.slow
def test_peers_with_ipv4_alone_and_peers_with_ipv6_alone_train_together_through_one_that_has_both(
    internet: Internet, swarm: NatSwarm
) -> None:
    """The only peer of stage 0 has IPv4, those of stage 1 have both and IPv6, and the trainer has IPv6."""
    both = internet.public_host()
    swarm.start_peer_on(both, 1)
    old = swarm.start_peer_on(internet.public_host(has_ipv6=False), 0)
    assert not old.ready["endpoint"].startswith("tunnel:")
    new = swarm.start_peer_on(internet.host("ipv6"), 1)
    assert new.ready["endpoint"].startswith("tunnel:")
    swarm.train_on(internet.host("ipv6"), 6)
    rows = swarm.answers_from(both)
    assert rows["peer-2"]["forwards"]
    assert rows["peer-3"]["forwards"]
    swarm.assert_proven()


@pytest.mark.slow
def test_a_swarm_whose_peers_are_relayed_follows_one_process(internet: Internet, swarm: NatSwarm) -> None:
    """All but the meeting point are behind routers, and so is the trainer. Only the meeting point's two ports are
    reached."""
    public, trainers_host = internet.public_host(), internet.host("symmetric")
    first = swarm.start_peer_on(public, 0)
    ports = f"{first.entry.rpartition(':')[2]}, {first.address.split('/')[4]}"
    chain = f"type filter hook input priority 0\niifname != lo ct state new tcp dport != {{ {ports} }} drop\n"
    nft(public, f"table inet closed {{ chain in {{\n{chain}}}\n}}\n")
    for stage in (0, 1, 1):
        swarm.start_peer_on(internet.host("symmetric"), stage)
    swarm.train_on(trainers_host, 8)
    rows = swarm.answers_from(trainers_host)
    assert [rows[f"peer-{number}"]["reached"] for number in (2, 3, 4)] == ["relayed"] * 3
    config, data = with_corpus(load(swarm.config))
    expected = train_reference(Reference(config, data), 8, {}).losses
    losses = [row["train/loss"] for row in swarm.steps("trainer")]
    assert losses == pytest.approx(expected, rel=1e-5)
    wrong = train_reference(Reference(config, data), 8, {19: 0}).losses
    assert losses != pytest.approx(wrong, rel=1e-5), "a microbatch that is left out would be noticed"
    swarm.assert_proven()


@pytest.mark.slow
def test_lost_packets_between_two_stages_cost_no_sample_and_are_told_as_they_are(
    internet: Internet, swarm: NatSwarm
) -> None:
    """Of the packets with which connections begin, 30 % are lost all the time, and for a while all packets are."""
    sender, others = internet.public_host(), [internet.public_host() for _ in range(2)]

    def lose(rule: str) -> None:
        hosts = ", ".join(host.address for host in others)
        hosts6 = ", ".join(host.address6 for host in others)
        chain = f"type filter hook output priority 0\nip daddr {{ {hosts} }} {rule}\nip6 daddr {{ {hosts6} }} {rule}\n"
        nft(sender, f"table inet lossy\ndelete table inet lossy\ntable inet lossy {{ chain out {{\n{chain}}}\n}}\n")

    lose("tcp flags & (syn | ack) == syn numgen random mod 100 < 30 drop")
    swarm.start_peer_on(sender, 0)
    for host in others:
        swarm.start_peer_on(host, 1)
    trainer = swarm.start_trainer_on(internet.public_host())
    swarm.wait_for_steps("trainer", 5, swarm.start_seconds)
    lose("meta l4proto tcp drop")
    log = trainer.log
    wait_until(
        lambda: "both peers of stage 1 failed just now" in log.read_text(), swarm.end_seconds, "the trainer to say so"
    )
    lose("tcp flags & (syn | ack) == syn numgen random mod 100 < 30 drop")
    swarm.wait_for_more("trainer", 4, swarm.end_seconds)
    swarm.interrupt(trainer)
    assert "no answer" in log.read_text()
    assert "has no peer" not in log.read_text(), "both are announced all the time"
    swarm.assert_proven()


@pytest.mark.slow
def test_behind_a_path_that_drops_large_packets_each_program_says_so_and_others_train_on(
    internet: Internet, swarm: NatSwarm
) -> None:
    """This is so in a VPN whose MTU no machine is told: connections open, and no message of several packets passes."""
    for stage in (0, 1):
        swarm.start_peer_on(internet.public_host(), stage)
    trainer = swarm.start_trainer_on(internet.public_host())
    cut = internet.host("restricted")
    chain = "type filter hook forward priority 0\nmeta length > 1300 drop\n"
    nft(internet.router_of(cut), f"table inet vpn {{ chain on_the_way {{\n{chain}}}\n}}\n")
    swarm.wait_for_steps("trainer", 2, swarm.start_seconds)
    words: dict[str, list[str]] = {"peer": [], "trainer": ["--output", str(swarm.folder / "cut-off")], "doctor": []}
    programs = [swarm.start_on(cut, f"cut-off-{name}", name, swarm.invite, *options) for name, options in words.items()]
    codes: dict[str, int] = {}

    def have_ended() -> bool:
        codes.update({ended.name: ended.returncode for ended in swarm.children.exits()})
        return all(program.name in codes for program in programs)

    wait_until(have_ended, swarm.end_seconds, "all three to end")
    for program in programs:
        assert codes[program.name] != 0
        said = program.log.read_text()
        assert "short messages pass on the way there, and none that takes several packets" in said
        assert "Traceback" not in said
    swarm.wait_for_more("trainer", 3, swarm.end_seconds)
    rows = swarm.answers_from(internet.public_host())
    assert sorted(rows) == ["peer-1", "peer-2"], "nobody else was announced"
    assert [rows[name]["rerouted_backwards"] for name in ("peer-1", "peer-2")] == [0, 0]
    swarm.interrupt(trainer)
    swarm.assert_proven()


@pytest.mark.slow
def test_a_relay_that_is_killed_costs_a_re_route_and_no_sample(internet: Internet, swarm: NatSwarm) -> None:
    public = [internet.public_host() for _ in range(3)]
    for host in public:
        swarm.start_peer_on(host, 0)
    # Two of them, of which neither can punch a way to the other.
    for _ in range(2):
        swarm.start_peer_on(internet.host("symmetric"), 1)
    trainer = swarm.start_trainer_on(internet.host("symmetric"), 30)
    swarm.wait_for_steps("trainer", 5, swarm.start_seconds)
    carriers = [name for name, row in swarm.answers_from(public[0]).items() if row["carried_bytes"]]
    assert carriers
    victim = next(peer for peer in swarm.peers if peer.child.name == carriers[-1])
    swarm.kill(victim)
    swarm.wait_for_more("trainer", 3, swarm.end_seconds)
    assert swarm.wait_for_end(trainer) == 0
    swarm.assert_proven()


@pytest.mark.slow
def test_a_relayed_peer_whose_machine_slept_comes_back_and_counts_again(internet: Internet, swarm: NatSwarm) -> None:
    """It sleeps for longer than a record lasts, and the run's other peer of that stage goes on meanwhile."""
    public = internet.public_host()
    swarm.start_peer_on(public, 0)
    swarm.start_peer_on(internet.host("symmetric"), 0)
    swarm.start_peer_on(public, 1)
    sleeper = swarm.start_peer_on(internet.host("symmetric"), 1)
    trainer = swarm.start_trainer_on(internet.host("symmetric"))
    swarm.wait_for_steps("trainer", 5, swarm.start_seconds)
    slept_after = swarm.answers_from(public)[sleeper.child.name]["forwards"]
    os.killpg(sleeper.child.pid, signal.SIGSTOP)
    wait_until(lambda: sleeper.child.name not in swarm.status_from(public), swarm.end_seconds, "its record to end")
    swarm.wait_for_more("trainer", 3, swarm.end_seconds)
    os.killpg(sleeper.child.pid, signal.SIGCONT)

    def counts_again() -> bool:
        row = swarm.status_from(public).get(sleeper.child.name, {"state": "gone"})
        return bool(row["state"] == "serving" and row["members"] == 2 and row["forwards"] > slept_after)

    wait_until(counts_again, swarm.end_seconds, "it to be used again")
    swarm.interrupt(trainer)
    swarm.assert_proven()
