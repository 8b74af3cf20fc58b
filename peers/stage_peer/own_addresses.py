"""At which of this machine's addresses others reach it: what a peer announces unless --announce names something.

Used by swarm-peer before it starts its DHT node. The way that the system takes to the peers that are joined decides,
and then its default way. Addresses of bridges to containers and virtual machines are left out: every machine with
Docker has the same one. `announced_hosts` is pure; the rest asks the system, and sends no packet.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence

import psutil

_ELSEWHERE = {4: "203.0.113.1", 6: "2001:db8::1"}
"""Addresses that nobody has (RFC 5737 and 3849): the way to them is the default one."""
_BRIDGE = re.compile(r"(docker|br-|veth|virbr|cni|podman|flannel|cali|lxc|lxd|incus|vmnet|vboxnet)")
_HOST = re.compile(r"/(?:ip4|ip6|dns[46]?)/([^/]+)/tcp/(\d+)")


def announced_hosts(
    host: str, interfaces: Mapping[str, Sequence[str]], *, towards_peers: Sequence[str], by_default: str | None
) -> list[str]:
    """The IP addresses to announce, the best first, those of the loopback last.

    Args:
        host: IP address to listen on; any but 0.0.0.0 and :: is the only one that can be announced.
        interfaces: the addresses of each network interface, by its name.
        towards_peers: the own address on the way to each peer that is joined.
        by_default: the own address on the default way. What carries that is no container's bridge, whatever its name.
    """
    listens_at = ipaddress.ip_address(host)
    if not listens_at.is_unspecified:
        return [host]
    outside, bridges, loopback = [], set(), []
    for name, addresses in interfaces.items():
        for address in addresses:
            ip = ipaddress.ip_address(address)
            if ip.version != listens_at.version or ip.is_link_local:
                continue
            if ip.is_loopback:
                loopback.append(address)
            elif _BRIDGE.match(name) and address != by_default:
                bridges.add(address)
            else:
                outside.append(address)
    preferred = [address for address in (*towards_peers, by_default) if address in outside]
    return list(dict.fromkeys([*preferred, *outside, *loopback]))


def own_hosts(host: str, initial_peers: Sequence[str]) -> list[str]:
    """The same for this machine, for a peer that joins at these DHT addresses.

    Empty where `host` is no IP address. The DHT node complains of that, and of initial peers that are no addresses,
    which are passed over here.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return []
    found = filter(None, map(_HOST.match, initial_peers))
    towards = (own_address(peer[1], int(peer[2]), version) for peer in found)
    return announced_hosts(
        host, _interfaces(), towards_peers=[address for address in towards if address is not None],
        by_default=own_address(_ELSEWHERE[version], 9, version),
    )  # fmt: skip


def own_address(host: str, port: int, version: int) -> str | None:
    """This machine's address on the way to another one; None if there is no way, or not with this version of IP."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # Of UDP this only looks up the way.
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None


def _interfaces() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [address.address.partition("%")[0] for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
