"""Free ports of the loopback, for programs that must be given a port before they start."""

import random
import socket
from collections.abc import Iterator

_FIRST, _LAST = 20_000, 32_767
"""These ports are below those that Linux gives to outgoing connections (`ip_local_port_range`). A port from that range
could be taken by a connection of any process before the program listens at it."""


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports. None of them has a listener, and none was returned before. Raises OSError."""
    return [next(_ports) for _ in range(count)]


def _chosen() -> Iterator[int]:
    # Each process chooses a random order of its own, so that processes that run at the same time try different ports.
    for port in random.SystemRandom().sample(range(_FIRST, _LAST + 1), _LAST + 1 - _FIRST):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
    raise OSError(f"no port from {_FIRST} to {_LAST} is free any more")


_ports = _chosen()
