"""HOST:PORT, written and read; an IPv6 address stands in brackets.

Also which addresses others may have this machine dial, and the address by which this machine reaches another one.
"""

import ipaddress
import socket

import psutil

LOOPBACK = "127.0.0.1"
"""Where servers listen that only this machine is to reach."""
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def endpoint_of(host: str, port: int) -> str:
    """HOST:PORT, for a name or an IP address without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The inverse of `endpoint_of`; the host may be missing. Raises ValueError if the text is no endpoint."""
    host, _, port = endpoint.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint[:80]!r} is no host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def ip_of(host: str) -> Ip | None:
    """The IP address that the text of a host stands for; None if that is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def plain_ip_of(host: str) -> Ip | None:
    """As `ip_of`, but of an IPv6 address that stands for an IPv4 address the latter."""
    ip = ip_of(host)
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def may_be_dialled(host: str, named_by: str) -> bool:
    """Whether this machine may open a connection because somebody else asks for it. `host` is where to. A name may not
    be dialled, because it may stand for any address. `named_by` is the IP address of whoever asks. It may itself be
    dialled; and if it is of this machine, so may any.
    """
    ip, asking = plain_ip_of(host), plain_ip_of(named_by)
    if ip is None or asking is None:
        return False
    if ip == asking or asking.is_loopback:
        return True
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified)


def own_host(family: int, towards: tuple[str, int]) -> str:
    """This machine's address on the way to another one's host and port. Raises OSError if there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)  # With UDP this sends nothing, and only looks up the route.
        host: str = probe.getsockname()[0]
        return host


def own_versions() -> set[int]:
    """The versions of IP, 4 or 6, of which this machine has an address that is neither loopback nor link-local."""
    found = set[int]()
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(address.address.partition("%")[0])
                found |= set() if ip.is_loopback or ip.is_link_local else {ip.version}
    return found
