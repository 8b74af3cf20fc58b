"""Where a process listens: the addresses that its machine has, and those that it announces."""

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import psutil

from swarm.dht.addresses import is_host, is_node, place
from swarm.rpc.endpoint import LOOPBACK, endpoint_of, host_and_port, ip_of, own_host

logger = logging.getLogger(__name__)

MOST_OWN = 2
"""The most of a machine's own addresses that are announced behind others."""
_PRIVATE = [
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "fc00::/7", "fe80::/10", "::1/128")
]
"""Networks that every machine, home or company has (RFC 6890)."""
_HOST_AND_PORT = re.compile(r"(?:\[(?P<ip>[^\]]*:[^\]]*)\]|(?P<host>[^:]+))(?::(?P<port>\d{1,5}))?|(?P<bare>.*:.*:.*)")
_ELSEWHERE = {4: "203.0.113.1", 6: "2001:db8::1"}
"""Addresses that no machine has (RFC 5737 and 3849). The system's route to them is its default route."""
_BRIDGE = re.compile(r"(docker|br-|veth|virbr|cni|podman|nerdctl|flannel|cali|kube|lxc|lxd|incus|vmnet|vboxnet)")
_DOCKER = "172.17.0.1"
"""The address of Docker's own bridge, whatever the bridge's name is."""


@dataclass(frozen=True)
class Outside:
    """An address at which others reach one of this machine's ports."""

    host: str
    port: int = 0
    """The port there; 0 for the same port as the server's own."""

    @classmethod
    def parse(cls, text: str, *, option: str) -> Self:
        """Read HOST or HOST:PORT; an IPv6 address with a port stands in brackets. Raises ValueError if the text is
        neither; the error names the option."""
        match = _HOST_AND_PORT.fullmatch(text.lower())
        host = match and (match["ip"] or match["host"] or match["bare"])
        port = int(match["port"] or 0) if match else 0
        if not match or not host or not is_host(host) or (match["port"] and not 0 < port < 65536):
            raise ValueError(f"{option} takes HOST or HOST:PORT, by name or IP address ([...] for IPv6), not {text!r}")
        return cls(host, port)

    def require_heard(self, listens_at: str, *, option: str) -> None:
        """Raise ValueError if nothing sent to this address can arrive at a server on `listens_at`.

        If the address has a port, a router may forward that port to another address, so most checks are left out.
        """
        listening, own = ip_of(listens_at), ip_of(self.host)
        if own is not None and (own.is_unspecified or own.is_multicast):
            raise ValueError(
                f"{option} {self.host}: this is no machine's address; give the one at which others reach it"
            )
        if listening is None or own is None or self.port:
            return
        if listening.version != own.version:
            raise ValueError(
                f"{option} {self.host}: with --host {listens_at} this peer listens on IPv{listening.version} alone; "
                "leave --host out, and it listens on both"
            )
        if own.is_loopback and not listening.is_unspecified and not listening.is_loopback:
            raise ValueError(f"{option} {self.host}: this peer listens on {listens_at} alone")


class PortOptions:
    """What follows from options of these names, for the programs that have them."""

    host: str
    port: int
    dht_port: int
    announce: tuple[str, ...]
    announce_dht: tuple[str, ...]

    @property
    def shares_port(self) -> bool:
        return 0 < self.port == self.dht_port

    @property
    def outside(self) -> tuple[Outside, ...]:
        return tuple(Outside.parse(text, option="--announce") for text in self.announce)

    @property
    def outside_dht(self) -> tuple[Outside, ...]:
        if not self.announce_dht:
            return self.outside if self.shares_port else tuple(Outside(outside.host) for outside in self.outside)
        return tuple(Outside.parse(text, option="--announce-dht") for text in self.announce_dht)

    def require_heard(self) -> None:
        """Raise ValueError for an address that is none, or as Outside.require_heard does."""
        for option, outside in (("--announce", self.outside), ("--announce-dht", self.outside_dht)):
            for one in outside:
                one.require_heard(self.host, option=option)


def loopback_advice(host: str) -> str:
    """What is wrong with a --host that only this machine can reach, and what to do; empty for any other one."""
    ip = ip_of(host)
    if ip is None or not ip.is_loopback:
        return ""
    return f"only this machine can reach --host {host}: leave --host out, and others reach all of its addresses"


def private_advice(endpoints: Iterable[str]) -> str:
    """What to do if nobody beyond this machine's own network can reach any of these endpoints; empty if somebody can.

    A name, and the addresses of a VPN, count as reached.
    """
    ips = [ip_of(host_and_port(endpoint)[0]) for endpoint in endpoints]
    if not ips or not all(ip is not None and any(ip in network for network in _PRIVATE) for ip in ips):
        return ""
    return (
        f"only this machine's own network reaches {', '.join(map(str, dict.fromkeys(ips)))}: for others, forward the "
        "TCP port in the router, and name the address outside with --announce HOST"
    )


@dataclass(frozen=True, kw_only=True)
class Announced:
    """What others are told of a peer's addresses."""

    endpoints: tuple[str, ...] = ("",)
    """How they reach its gRPC server, the best first."""
    dht_addresses: tuple[str, ...] = ()
    """Where they enter the DHT at this peer, the best first; none if they cannot."""
    num_punched: int = 0
    """Present connections from callers that were punched with a meeting point's help."""
    num_relayed: int = 0
    """Present connections from callers that a meeting point carries."""


class Listening(Protocol):
    """Where a server listens, and which addresses it announces: a Reach, which asks others what they reach."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    def announced(self, own_port: int) -> Announced:
        """What others are told now, for a server that listens on `own_port`."""

    def held(self) -> AbstractAsyncContextManager[None]:
        """Leave the port to a server of this peer, which binds and unbinds it inside the block."""


@dataclass(frozen=True, kw_only=True)
class Listen:
    host: str
    """IP address to listen on; empty for all of this machine's."""
    port: int
    """TCP port for gRPC; 0 takes a free one."""
    outside: tuple[Outside, ...]
    own: tuple[Outside, ...] = ()
    """This machine's own addresses, where processes on it and in its network reach the port in any case."""
    dht_addresses: tuple[str, ...]
    """Where others enter the DHT, the best first."""
    dht_port: int = 0
    """TCP port at which the DHT's node listens; 0 if there is none that others can ask."""
    behind_front: tuple[int, int] | None = None
    """Where gRPC and the DHT share a port, which a Front has: the loopback's ports at which the server and the node
    listen."""

    @property
    def server(self) -> tuple[str, int]:
        return (self.host, self.port) if self.behind_front is None else (LOOPBACK, self.behind_front[0])

    @property
    def node(self) -> tuple[str, int]:
        return (self.host, self.dht_port) if self.behind_front is None else (LOOPBACK, self.behind_front[1])

    def endpoints(self, own_port: int) -> tuple[str, ...]:
        return tuple(endpoint_of(outside.host, outside.port or own_port) for outside in self.outside)

    def moved(self, own: tuple[Outside, ...]) -> Self:
        """The same with the addresses that the machine has now. Those that the user named stay."""
        return replace(self, outside=own if self.outside == self.own else self.outside, own=own)

    def behind(self, reached: Sequence[str], own_port: int) -> tuple[str, ...]:
        """The machine's own endpoints, to be announced behind those at which others reach it; none if one of those is
        its own. A router seldom leads from within to its own outer address."""
        own = tuple(endpoint_of(one.host, own_port) for one in self.own)
        return () if set(own) & set(reached) else own[:MOST_OWN]


class Candidates(NamedTuple):
    hosts: tuple[str, ...]
    """The addresses to announce, the best first: those that lead beyond this machine, if there are any."""
    is_decided: bool = True
    """Whether the first address is known to be on a route to others, or is the only one."""


def candidates(
    host: str, interfaces: Mapping[str, Sequence[str]], *, towards_peers: Sequence[str], by_default: Sequence[str]
) -> Candidates:
    """What to announce for a peer that listens at `host`, or if that is empty on all of IPv4 and IPv6.

    `interfaces` are the addresses of each network interface, by its name. `towards_peers` and `by_default` are this
    machine's addresses on the routes to the peers that it joins, and on the default routes: an interface with one of
    the latter is no bridge to containers, whatever its name is.
    """
    versions = {4, 6}
    if host:
        listens_at = ipaddress.ip_address(host)
        if not listens_at.is_unspecified:
            return Candidates((host,))
        versions = {listens_at.version}
    outside, loopback = list[str](), list[str]()
    for name, addresses in interfaces.items():
        for address in addresses:
            ip = ipaddress.ip_address(address)
            is_bridge = _BRIDGE.match(name) is not None or address == _DOCKER
            if ip.version not in versions or ip.is_link_local or (is_bridge and address not in by_default):
                continue
            (loopback if ip.is_loopback else outside).append(address)
    preferred = [address for address in (*towards_peers, *by_default) if address in outside]
    hosts = tuple(dict.fromkeys([*preferred, *outside])) or tuple(loopback)
    return Candidates(hosts, is_decided=bool(preferred) or len(outside) < 2)


def own_outside(host: str, initial_peers: Sequence[str], *, is_named: bool) -> tuple[Outside, ...]:
    """This machine's own addresses, the best first, for a peer that listens at `host` and enters the DHT at
    `initial_peers`. Unless the user named the addresses at which others reach it, a warning tells if it is not known
    which is the best."""
    hosts, is_decided = own_candidates(host, initial_peers)
    if not (is_named or is_decided):
        logger.warning(
            "this machine has no default route and several addresses: %s; others are told %s first. If they reach it "
            "by another one, give --announce HOST", ", ".join(hosts), hosts[0],
        )  # fmt: skip
    return tuple(map(Outside, hosts))


def own_candidates(host: str, initial_peers: Sequence[str]) -> Candidates:
    """The candidates of this machine, for a peer that joins at these DHT addresses; none if `host` is no IP address. Of
    these faults, and of initial peers that are no addresses, the DHT node tells, which starts next."""
    try:
        versions = [ipaddress.ip_address(host).version] if host else [4, 6]
    except ValueError:
        return Candidates(())
    peers = [place(address) for address in initial_peers if is_node(address)]
    towards = [own_address(*peer, version) for peer in peers for version in versions]
    by_default = [own_address(_ELSEWHERE[version], 9, version) for version in versions]
    return candidates(
        host, _interfaces(), towards_peers=[address for address in towards if address is not None],
        by_default=[address for address in by_default if address is not None],
    )  # fmt: skip


def own_address(host: str, port: int, version: int) -> str | None:
    """This machine's address on the route to another one; None without a route in this version of IP."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        return own_host(family, (host, port))
    except OSError:
        return None


def _interfaces() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [address.address.partition("%")[0] for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
