"""Ports that are free when they are asked for, for programs that have to be told one."""

import socket


def free_ports(count: int) -> list[int]:
    """As many different TCP ports of the loopback as are asked for, all without a listener."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
