"""Peers in networks of their own: ports that a cloud maps, several interfaces, IPv6 alone. Each joins by an invite."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from tests.support.swarm import CONFIG, wait_until, write_text

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nft")),
        reason="lays networks: needs root, iproute2 and nftables",
    ),
]
_INVITE = re.compile(r"join:   swarm-peer (swarm://\S+)")
_PREFIX = "swtest"


def _sh(script: str) -> None:
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Machine:
    """A network namespace."""

    name: str

    def sh(self, script: str) -> None:
        """Run commands in the namespace."""
        _sh(f"ip netns exec {_PREFIX}-{self.name} sh -euc '{script}'")

    def command(self, command: list[str]) -> list[str]:
        """The command line that runs a command in the namespace."""
        return ["ip", "netns", "exec", f"{_PREFIX}-{self.name}", *command]


class Lab:
    """Machines on one wire, `br0` of the machine `net`, and the programs that run on them."""

    def __init__(self, folder: Path, children: Supervisor) -> None:
        self._folder = folder
        self._children = children
        self._names: list[str] = []
        self._config = folder / "run.toml"
        dataset = write_text(folder / "text.txt")
        self._config.write_text(CONFIG.format(dataset=dataset, setting="synchronous"), encoding="utf-8")
        self.net = self.machine("net")
        self.net.sh("ip link add br0 type bridge && ip link set br0 up")

    def machine(self, name: str, *addresses: str) -> Machine:
        """Make a machine; with addresses it has an interface `eth0` on the wire."""
        self._names.append(name)
        _sh(f"ip netns add {_PREFIX}-{name}")
        machine = Machine(name)
        machine.sh("ip link set lo up")
        if addresses:
            self.join(machine, "eth0", "net", "br0", *addresses)
        return machine

    def join(self, machine: Machine, interface: str, other: str, bridge: str, *addresses: str) -> None:
        """Give a machine an interface that ends at another one's bridge."""
        end = f"v{len(self._names)}{machine.name}{interface}"[:15]
        here, there = f"{_PREFIX}-{machine.name}", f"{_PREFIX}-{other}"
        _sh(f"ip link add {interface} netns {here} type veth peer name {end} netns {there}")
        _sh(f"ip netns exec {there} ip link set {end} master {bridge} up")
        for address in addresses:
            machine.sh(f"ip addr add {address} dev {interface} {'nodad' if ':' in address else ''}")
        machine.sh(f"ip link set {interface} up")

    def close(self) -> None:
        """Remove the networks."""
        for name in self._names:
            _sh(f"ip netns del {_PREFIX}-{name}")

    def peer(self, machine: Machine, name: str, *words: str) -> tuple[dict[str, Any], str]:
        """Start a peer, and wait until it serves. Return the object in its ready file, and its invite."""
        ready = self._folder / f"{name}.json"
        own = [
            "--threads", "1", "--device", "cpu", "--name", name, "--identity", str(self._folder / f"{name}.pem"),
            "--ready-file", str(ready),
        ]  # fmt: skip
        child = self.start(machine, name, "peer", *words, *own)
        wait_until(ready.exists, 150.0, f"{name} to serve; see {child.log}")
        printed = wait_until(lambda: _INVITE.search(child.log.read_text()), 10.0, "the invite")
        return json.loads(ready.read_text()), printed[1]

    def first(self, machine: Machine, *words: str) -> tuple[dict[str, Any], str]:
        """Start the peer that begins the run; gives the same as `peer`."""
        return self.peer(machine, "first", "--config", str(self._config), *words)

    def start(self, machine: Machine, name: str, program: str, *words: str) -> Child:
        """Start a program on a machine."""
        return self._children.start(name, machine.command(command_line(program, words)))

    def require_training(self, machine: Machine, invite: str) -> None:
        """Have a trainer on the machine train one round."""
        words = ["--steps", "1", "--evaluate-every", "0", "--output", str(self._folder / "trainer")]
        trainer = self.start(machine, "trainer", "trainer", invite, *words)
        wait_until(lambda: (self._folder / "trainer" / "summary.json").exists(), 150.0, f"a step; see {trainer.log}")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Supervisor(tmp_path / "logs", grace_seconds=0.0) as children:
        lab = Lab(tmp_path, children)
        try:
            yield lab
        finally:
            lab.close()


def test_a_cloud_that_maps_ports(lab: Lab) -> None:
    """Outer 41001 and 41002 lead to inner 5001 and 5002; the peer behind them begins the run."""
    home = lab.machine("home", "192.0.0.71/26")
    router = lab.machine("router", "192.0.0.70/26")
    router.sh("ip link add lan type bridge && ip addr add 10.50.0.1/24 dev lan && ip link set lan up")
    router.sh("sysctl -qw net.ipv4.ip_forward=1")
    cloud = lab.machine("cloud")
    lab.join(cloud, "eth0", "router", "lan", "10.50.0.2/24")
    cloud.sh("ip route add default via 10.50.0.1")
    router.sh(
        "nft add table ip nat && "
        'nft "add chain ip nat in { type nat hook prerouting priority -100; }" && '
        'nft "add chain ip nat out { type nat hook postrouting priority 100; }" && '
        "nft add rule ip nat in iifname eth0 tcp dport 41001 dnat to 10.50.0.2:5001 && "
        "nft add rule ip nat in iifname eth0 tcp dport 41002 dnat to 10.50.0.2:5002 && "
        "nft add rule ip nat out oifname eth0 masquerade"
    )
    mapped = ["--announce", "192.0.0.70:41001", "--announce-dht", "192.0.0.70:41002"]
    ready, invite = lab.first(cloud, "--port", "5001", "--dht-port", "5002", *mapped)
    assert ready["endpoint"] == "192.0.0.70:41001"
    assert ready["dht_addresses"][0].startswith("/ip4/192.0.0.70/tcp/41002/p2p/")
    second, _ = lab.peer(home, "second", invite)
    assert second["stage"] == 1
    lab.require_training(home, invite)


def test_of_several_interfaces_the_one_on_the_way_to_the_others_is_announced(lab: Lab) -> None:
    """A bridge comes first, and all else goes through a VPN."""
    first = lab.machine("one", "192.168.1.6/24")
    _, invite = lab.first(first)
    several = lab.machine("several")
    several.sh("ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up")
    several.sh("ip link add tun0 type veth peer name far && ip addr add 10.8.0.2/24 dev tun0")
    several.sh("ip link set far up && ip link set tun0 up")
    several.sh("ip route add default via 10.8.0.1")
    lab.join(several, "eth0", "net", "br0", "192.168.1.7/24")
    ready, own_invite = lab.peer(several, "second", invite)
    assert ready["endpoint"].startswith("192.168.1.7:")
    assert ready["dht_addresses"][0].startswith("/ip4/192.168.1.7/")
    assert not any("172.17.0.1" in address for address in ready["dht_addresses"])
    lab.require_training(first, own_invite)


def test_ipv6_alone(lab: Lab) -> None:
    """IPv6 needs no option."""
    first, second = lab.machine("one", "2001:db8:1::6/64"), lab.machine("two", "2001:db8:1::7/64")
    ready, invite = lab.first(first)
    assert ready["endpoint"].startswith("[2001:db8:1::6]:")
    ready, _ = lab.peer(second, "second", invite)
    assert ready["endpoint"].startswith("[2001:db8:1::7]:")
    lab.require_training(second, invite)
