"""Multiaddresses of DHT nodes: reads those that users type, makes those on which a node listens, and explains why a
node cannot be joined. Never resolves a name.
"""

import re
import socket
from collections.abc import Iterable, Sequence

from swarm.errors import PeerUnavailable
from swarm.rpc.endpoint import ip_of

Node = tuple[str, ...]
"""All known addresses of one node: libp2p dials them at the same time, and keeps the connection that opens first."""

_EXPLANATIONS = {
    "peer id mismatch": "another peer answers there: it restarted under a new identity, so copy its present address",
    "dial to self": "that is this peer's own address: two peers cannot share one identity file",
    "local time": "this machine's clock and theirs differ by more than 3 s: set the time",
}
"""Words in the errors of libp2p and hivemind when a node cannot be joined, and the explanation that the user gets
instead."""
_NODE = re.compile(
    r"/(?:(?P<family>ip4|ip6)/(?P<ip>[^/%]+)|dns[46]?/[A-Za-z0-9.-]+)/tcp/(?P<port>[0-9]{1,5})"
    r"/p2p/(?P<peer_id>[1-9A-HJ-NP-Za-km-z]{40,64})"
)
"""What hivemind takes too: no IPv6 address with a scope, and no name with an underscore."""


class Unjoinable(PeerUnavailable):
    """No node can be joined at the given addresses, and trying again would not help."""


def cannot_join(tried: Sequence[Node], faults: Sequence[str]) -> PeerUnavailable:
    """The error to raise if none of these nodes can be joined, by libp2p's or hivemind's fault for each."""
    explained = [text for fault in faults for needle, text in _EXPLANATIONS.items() if needle in fault]
    where = f"cannot join the DHT at {', '.join(address for node in tried for address in node)}"
    if len(explained) < len(faults):
        return PeerUnavailable(f"{where}: check the address, that a swarm-peer runs there, and that its port is open")
    return Unjoinable(f"{where}: {explained[0]}")


def is_node(address: str) -> bool:
    try:
        split(address)
    except ValueError:
        return False
    return True


def split(address: str) -> tuple[str, str]:
    """Split a node's address into its endpoint and its libp2p id. Raises ValueError, whose one line shows what an
    address looks like."""
    match = _NODE.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536 or (match["ip"] and match["family"] != _family(match["ip"])):
        raise ValueError(
            f"{address!r} is no address of a DHT node: copy the whole address that a swarm-peer prints, "
            "such as /ip4/192.0.2.1/tcp/4001/p2p/12D3Koo..."
        )
    return address[: address.rindex("/p2p/")], match["peer_id"]


def place(address: str) -> tuple[str, int]:
    _, _, host, _, port, *_ = address.split("/")
    return host, int(port)


def require_all(given: Iterable[str]) -> None:
    """Raise ValueError for the first string that is no node's address."""
    for address in given:
        split(address)


def of_nodes(given: Iterable[str]) -> list[Node]:
    """Group addresses by node, in the order in which nodes are first named. Strings that are no node's address are left
    out."""
    nodes: dict[str, list[str]] = {}
    for address in filter(is_node, dict.fromkeys(given)):
        nodes.setdefault(split(address)[1], []).append(address)
    return [tuple(addresses) for addresses in nodes.values()]


def at(host: str, port: int) -> str:
    return f"/{_family(host)}/{host}/tcp/{port}"


def is_host(name: str) -> bool:
    """Whether this is an IP address, or may be a host's name, which libp2p takes only in lower case."""
    if re.fullmatch(r"[0-9.]+|.*:.*", name):
        return _family(name) != "dns"
    labels = name.split(".")
    return len(name) < 254 and all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", label) for label in labels)


def hosts(host: str) -> list[str]:
    """The hosts on which a node listens for a given `host`: just this one, or, if it is empty, all addresses of this
    machine, of IPv4 and, if the system has it, of IPv6."""
    if host:
        return [host]
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return ["0.0.0.0"]
    return ["0.0.0.0", "::"]


def free_port(host: str, port: int) -> int:
    """Check that a port of this machine is free, and return it; for port 0 choose a free one. Raises ValueError, whose
    one line says why the port cannot be used."""
    family = socket.AF_INET6 if _family(host) == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # As libp2p does, so that the same port can be free for IPv4 and for IPv6.
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
            chosen: int = probe.getsockname()[1]
            return chosen
    except (OSError, OverflowError) as error:
        raise ValueError((isinstance(error, OSError) and error.strerror) or str(error)) from None


def require_free_port(host: str, port: int) -> int:
    """Check like `free_port`, on all hosts on which a DHT node would listen. Without this check, libp2p would silently
    share the port with another node."""
    for one in hosts(host):
        try:
            port = free_port(one, port)
        except ValueError as error:
            raise ValueError(
                f"the DHT cannot listen on {one} port {port}: {error}; choose another host or port"
            ) from None
    return port


def _family(host: str) -> str:
    ip = ip_of(host)
    return "dns" if ip is None else f"ip{ip.version}"
