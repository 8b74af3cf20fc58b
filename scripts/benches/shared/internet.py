"""A small internet of network namespaces: public hosts, routers of several kinds, and hosts behind them.

It needs root, iproute2 and nftables. No namespace has a link to the machine's own network. The public addresses,
192.0.0.64/26, are of a block that is reserved by the IETF (RFC 6890) and nobody's.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

KINDS = {
    "none": "a public address", "full-cone": "a router that lets everybody in, at the same ports",
    "restricted": "a router that keeps a connection's port, and lets in answers alone",
    "symmetric": "a router that gives every connection another port",
    "cgnat": "two routers, the user's and the provider's", "udp-blocked": "a router that lets no UDP through",
    "ipv6": "IPv6 alone, and a firewall that lets in answers",
    "dual-stack": "the firewall for IPv6, and beside it a router for IPv4 that lets in answers",
}  # fmt: skip
"""Ways to be connected."""

_SHARED, _FIRST_PUBLIC, _FIRST_ROUTER = "192.0.0", 65, 81
_READDRESSED = 24  # How far the second address of a host or router is from its first
_SHARED6 = "2001:db8:0:1"
_IPV6 = ("ipv6", "dual-stack")
_MASQUERADE = {"symmetric": "masquerade fully-random"}
# Packets are dropped and not rejected, as home routers do. With a drop in `input`, the connection tracker does not
# remember a stranger's packet. Otherwise that packet would occupy the port that a punched connection needs.
_RULES = """
table ip nat {{
    chain pre {{
        type nat hook prerouting priority -100
        {forward}
    }}
    chain post {{
        type nat hook postrouting priority 100
        oifname "wan" {masquerade}
    }}
}}
table inet filter {{
    chain forward {{
        type filter hook forward priority 0; policy drop;
        {udp}
        ct state established,related accept
        ct status dnat accept
        iifname "lan" accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    }}
    chain input {{
        type filter hook input priority 0; policy accept;
        ct state established,related accept
        iifname "wan" meta l4proto {{ tcp, udp }} drop
    }}
}}
"""


@dataclass(frozen=True)
class Host:
    """A machine of this internet."""

    namespace: str
    address: str
    address6: str = ""

    def command(self, command: Sequence[object]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]


def missing() -> str:
    """Text that says what this machine lacks for such an internet; empty if it lacks nothing."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    return next((f"{program} is not installed" for program in ("ip", "nft", "tc") if shutil.which(program) is None), "")


class Internet:
    """An internet of namespaces. Leaving the `with` block removes it, with all processes inside. Namespaces that killed
    processes have left behind are removed first."""

    def __init__(self) -> None:
        self._prefix = f"swarm{os.getpid()}-"
        self._names: list[str] = []
        self._num_public = self._num_routers = 0
        self._outer_ends: dict[str, tuple[str, str]] = {}
        """For the namespace of each host, the other end of its line: a namespace, and an interface there."""
        self._routers6: list[str] = []
        self._with_ipv6: list[str] = []

    def __enter__(self) -> Self:
        _sweep()
        self._add("net")
        self._in("net", "ip link add br0 type bridge")
        self._in("net", "ip link set br0 up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            _remove(name)

    def public_host(self, *, has_ipv6: bool = True) -> Host:
        number = _FIRST_PUBLIC + self._num_public
        self._num_public += 1
        name = f"pub{number}"
        self._add(name)
        self._link(name, "eth0", "net", "br0")
        self._in(name, f"ip addr add {_SHARED}.{number}/26 dev eth0")
        if not has_ipv6:
            self._in(name, "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=1")
            return Host(self._prefix + name, f"{_SHARED}.{number}")
        self._in(name, f"ip addr add {_SHARED6}::{number}/64 dev eth0 nodad")
        self._with_ipv6.append(name)
        self._route6()
        return Host(self._prefix + name, f"{_SHARED}.{number}", f"{_SHARED6}::{number}")

    def host(self, kind: str) -> Host:
        """Add a host that is connected in one of the ways in KINDS, with a router of its own."""
        if kind == "none":
            return self.public_host()
        number = _FIRST_ROUTER + self._num_routers
        self._num_routers += 1
        outside, bridge, wan = "net", "br0", f"{_SHARED}.{number}/26"
        default = ""
        if kind == "cgnat":
            outside, bridge = self._router(f"isp{number}", "net", "br0", wan, f"100.64.{number}.1", "restricted")
            wan, default = f"100.64.{number}.2/24", f"100.64.{number}.1"
        inner, lan = self._router(f"r{number}", outside, bridge, wan, f"10.{number}.0.1", kind, default)
        name = f"h{number}"
        self._add(name)
        self._link(name, "eth0", inner, lan)
        address, address6 = f"10.{number}.0.11", f"2001:db8:{number}::11"
        if kind in _IPV6:
            self._in(name, f"ip addr add {address6}/64 dev eth0 nodad")
            self._in(name, f"ip route add default via 2001:db8:{number}::1")
        if kind == "ipv6":
            return Host(self._prefix + name, address6)
        self._in(name, f"ip addr add {address}/24 dev eth0")
        self._in(name, f"ip route add default via 10.{number}.0.1")
        return Host(self._prefix + name, address, address6 if kind in _IPV6 else "")

    def router_of(self, host: Host) -> Host:
        """The router of a host that has one, with its outer address. The router's interfaces are `lan` and `wan`."""
        number = host.namespace.rpartition("-h")[2]
        return Host(f"{self._prefix}r{number}", f"{_SHARED}.{number}")

    def close_but(self, host: Host, port: int) -> None:
        """Let others in at only one TCP port of a host; nobody sees the others."""
        chain = f"type filter hook input priority 0\niifname != lo ct state new tcp dport != {port} drop\n"
        _run(f"ip netns exec {host.namespace} nft -f -", f"table inet closed {{ chain in {{\n{chain}}}\n}}\n")

    def readdress(self, host: Host) -> None:
        """Give a public host, or else the router of a host, another IPv4 address, as providers do. All of its
        connections break."""
        is_public = host.address.startswith(_SHARED)
        place, interface = (host, "eth0") if is_public else (self.router_of(host), "wan")
        number = int(place.address.rpartition(".")[2]) + _READDRESSED
        # The first address goes first: with it go all others of its network.
        _run(f"ip -n {place.namespace} addr del {place.address}/26 dev {interface}")
        _run(f"ip -n {place.namespace} addr add {_SHARED}.{number}/26 dev {interface}")

    def limit(self, host: Host, megabits_per_second: float) -> None:
        rule = f"rate {megabits_per_second}mbit burst 64kb latency 200ms"
        for namespace, interface in ((host.namespace, "eth0"), self._outer_ends[host.namespace]):
            _run(f"ip netns exec {namespace} tc qdisc replace dev {interface} root tbf {rule}")

    def _router(
        self, name: str, outside: str, bridge: str, wan: str, inside: str, kind: str, default: str = ""
    ) -> tuple[str, str]:
        self._add(name)
        self._link(name, "wan", outside, bridge)
        self._in(name, f"ip addr add {wan} dev wan")
        self._in(name, "ip link add lan type bridge")
        self._in(name, "ip link set lan up")
        self._in(name, f"ip addr add {inside}/24 dev lan")
        self._in(name, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
        if default:
            self._in(name, f"ip route add default via {default}")
        if kind in _IPV6:
            number = inside.split(".")[1]
            self._in(name, f"ip addr add {_SHARED6}::{number}/64 dev wan nodad")
            self._in(name, f"ip addr add 2001:db8:{number}::1/64 dev lan nodad")
            self._routers6.append(number)
            self._route6()
        forward = f'iifname "wan" dnat to {inside.rpartition(".")[0]}.11' if kind == "full-cone" else ""
        udp = "meta l4proto udp drop" if kind == "udp-blocked" else ""
        rules = _RULES.format(forward=forward, masquerade=_MASQUERADE.get(kind, "masquerade"), udp=udp)
        _run(f"ip netns exec {self._prefix}{name} nft -f -", rules)
        return name, "lan"

    def _route6(self) -> None:
        """Give all IPv6 hosts routes to the networks behind routers, which translate no IPv6 addresses."""
        for public in self._with_ipv6:
            for number in self._routers6:
                self._in(public, f"ip route replace 2001:db8:{number}::/64 via {_SHARED6}::{number}")
        for router in self._routers6:
            for number in self._routers6:
                if number != router:
                    self._in(f"r{router}", f"ip route replace 2001:db8:{number}::/64 via {_SHARED6}::{number}")

    def _add(self, name: str) -> None:
        # The namespace is noted before it is made, because a signal may come between the two.
        self._names.append(self._prefix + name)
        _run(f"ip netns add {self._prefix}{name}")
        self._in(name, "ip link set lo up")

    def _link(self, inner: str, interface: str, outer: str, bridge: str) -> None:
        inner_name, outer_name = self._prefix + inner, self._prefix + outer
        _run(f"ip link add {interface} netns {inner_name} type veth peer name v-{inner} netns {outer_name}")
        _run(f"ip -n {outer_name} link set v-{inner} master {bridge} up")
        _run(f"ip -n {inner_name} link set {interface} up")
        self._outer_ends[inner_name] = (outer_name, f"v-{inner}")

    def _in(self, name: str, command: str) -> None:
        _run(f"ip netns exec {self._prefix}{name} {command}")


def _sweep() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        made_by = re.fullmatch(r"(swarm(\d+)-\w+)( .*)?", line)
        if made_by and not Path("/proc", made_by[2]).exists():
            _remove(made_by[1])


def _remove(name: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in pids.stdout.split():
        subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(command: str, text: str = "") -> None:
    result = subprocess.run(command.split(), input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"{command}: {result.stderr.strip()}")
