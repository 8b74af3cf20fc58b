"""Ports for programs that have to be told one: each is free, returned once, and never given to a connection."""

import socket
from pathlib import Path

from scripts.benches.shared.ports import free_ports


def test_no_port_is_returned_twice_or_may_be_given_to_a_connection() -> None:
    ports = [*free_ports(100), *free_ports(100)]
    assert len(set(ports)) == 200
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < first_of_connections
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
