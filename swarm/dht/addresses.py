"""Multiaddresses of DHT nodes: what users type, and what a node listens on.

Used by node. Pure, but for a look whether a port is free. Never resolves a name.
"""

import ipaddress
import re
import socket

_NODE = re.compile(
    r"/(?:(?P<family>ip4|ip6)/(?P<ip>[^/]+)|dns[46]?/[A-Za-z0-9._-]+)/tcp/(?P<port>\d{1,5})"
    r"/p2p/(?P<peer_id>[1-9A-HJ-NP-Za-km-z]{40,64})"
)


def split(address: str) -> tuple[str, str]:
    """A node's address as (where it is, which libp2p id it has).

    Raises:
        ValueError: it is no node's address; one line shows what one looks like.
    """
    match = _NODE.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536 or (match["ip"] and match["family"] != _family(match["ip"])):
        raise ValueError(
            f"{address!r} is no address of a DHT node: copy the whole address that a swarm-peer prints, "
            "such as /ip4/192.0.2.1/tcp/4001/p2p/12D3Koo..."
        )
    return address[: address.rindex("/p2p/")], match["peer_id"]


def at(host: str, port: int) -> str:
    """The multiaddress of a TCP port on a host, given by IP address or by name."""
    return f"/{_family(host)}/{host}/tcp/{port}"


def is_host(name: str) -> bool:
    """Whether this is an IP address, or could be a host's name as libp2p takes it: in small letters."""
    if re.fullmatch(r"[0-9.]+|.*:.*", name):
        return _family(name) != "dns"
    labels = name.split(".")
    return len(name) < 254 and all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", label) for label in labels)


def require_free_port(host: str, port: int) -> int:
    """Check that nobody listens on a port of this machine; 0 stands for any, and one is chosen.

    libp2p itself would share a port with another node in silence.

    Raises:
        ValueError: one line says why the port cannot be had.
    """
    family = socket.AF_INET6 if _family(host) == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            chosen: int = probe.getsockname()[1]
            return chosen
    except (OSError, OverflowError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ValueError(f"the DHT cannot listen on {host} port {port}: {reason}; choose another port") from None


def _family(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"
