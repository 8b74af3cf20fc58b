"""By which of its addresses this machine reaches another one.

Used where addresses are announced (peers/stage_peer) and where routers are punched (rpc/meeting). Sends nothing.
"""

import socket


def own_host(family: int, towards: tuple[str, int]) -> str:
    """This machine's address on the way to another one's host and port. Raises OSError if there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)  # Of UDP this only looks up the way.
        host: str = probe.getsockname()[0]
        return host
