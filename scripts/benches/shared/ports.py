"""Free ports of the loopback, for programs that have to be told one before they start."""

import random
import socket
from collections.abc import Iterator

_FIRST, _LAST = 20_000, 32_767
"""The ports below those that Linux gives to outgoing connections (`ip_local_port_range`). One of those may be taken
by any connection of any process before the program that was told it listens."""


def free_ports(count: int) -> list[int]:
    """As many different TCP ports as are asked for, none of which has a listener or was returned before.

    Raises:
        OSError: there are not as many.
    """
    return [next(_ports) for _ in range(count)]


def _chosen() -> Iterator[int]:
    # Processes that run side by side begin at different places: each chooses an order of its own.
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
