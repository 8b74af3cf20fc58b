"""Finds the addresses of this machine at which others reach it. A peer announces these unless --announce names others.

Used by swarm-peer before it starts its DHT node. First come this machine's addresses on the routes to the peers that it
joins, then its addresses on the default routes. Addresses of bridges to containers and virtual machines are left out,
because every machine with Docker has the same one. `candidates` is pure; the rest asks the system, and sends no packet.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from peers.stage_peer.listen import Outside
from swarm.rpc.endpoint import own_host

logger = logging.getLogger(__name__)

_ELSEWHERE = {4: "203.0.113.1", 6: "2001:db8::1"}
"""Addresses that no machine has (RFC 5737 and 3849). The system's route to them is its default route."""
_BRIDGE = re.compile(r"(docker|br-|veth|virbr|cni|podman|nerdctl|flannel|cali|kube|lxc|lxd|incus|vmnet|vboxnet)")
_DOCKER = "172.17.0.1"
"""The address of Docker's own bridge, whatever the bridge's name is."""
_HOST = re.compile(r"/(?:ip4|ip6|dns[46]?)/([^/]+)/tcp/(\d+)")


@dataclass(frozen=True)
class Candidates:
    """Addresses that a machine could announce.

    Attributes:
        outside: the addresses that lead beyond this machine, the best first.
        loopback: the addresses that do not.
        is_decided: whether the first address is known to be on a route to others, or is the only one.
    """

    outside: tuple[str, ...]
    loopback: tuple[str, ...]
    is_decided: bool

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses to announce: those that lead beyond this machine, if there are any."""
        return self.outside or self.loopback

    def say_if_undecided(self) -> None:
        """If it is not known which of the addresses others can use, log a warning that lists the addresses."""
        if not self.is_decided:
            logger.warning(
                "this machine has no default route and several addresses: %s; others are told %s first. If they reach "
                "it by another one, give --announce HOST", ", ".join(self.outside), self.outside[0],
            )  # fmt: skip


def candidates(
    host: str, interfaces: Mapping[str, Sequence[str]], *, towards_peers: Sequence[str], by_default: Sequence[str]
) -> Candidates:
    """What to announce for a peer that listens at `host`.

    Args:
        host: IP address to listen on, or empty for all of IPv4 and IPv6. A single address is the only one that can be
            announced.
        interfaces: the addresses of each network interface, by its name.
        towards_peers: this machine's address on the route to each peer that it joins.
        by_default: this machine's addresses on the default routes. An interface with one of these addresses is not a
            bridge to containers, whatever its name is.
    """
    versions = {4, 6}
    if host:
        listens_at = ipaddress.ip_address(host)
        if not listens_at.is_unspecified:
            return Candidates((host,), (), is_decided=True)
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
    return Candidates(
        outside=tuple(dict.fromkeys([*preferred, *outside])),
        loopback=tuple(loopback),
        is_decided=bool(preferred) or len(outside) < 2,
    )


def own_outside(host: str, initial_peers: Sequence[str], *, is_named: bool) -> tuple[Outside, ...]:
    """This machine's own addresses, the best first, for a peer that listens at `host`.

    Args:
        initial_peers: the addresses at which the peer enters the DHT.
        is_named: whether the user named the addresses at which others reach it. Otherwise a warning tells if it is not
            known which of these is the best.
    """
    own = own_candidates(host, initial_peers)
    if not is_named:
        own.say_if_undecided()
    return tuple(map(Outside, own.hosts))


def own_candidates(host: str, initial_peers: Sequence[str]) -> Candidates:
    """The candidates of this machine, for a peer that joins at these DHT addresses.

    If `host` is no IP address, there are no candidates. Initial peers that are no addresses are ignored. The DHT node,
    which starts next, raises an error in both cases.
    """
    try:
        versions = [ipaddress.ip_address(host).version] if host else [4, 6]
    except ValueError:
        return Candidates((), (), is_decided=True)
    found = [match for match in map(_HOST.match, initial_peers) if match is not None]
    towards = [own_address(peer[1], int(peer[2]), version) for peer in found for version in versions]
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
