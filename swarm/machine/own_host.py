"""The address by which this machine reaches another one.

Used where addresses are announced (peers/stage_peer) and where others are dialled (rpc/meeting). Sends nothing.
"""

import ipaddress
import socket

import psutil


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
