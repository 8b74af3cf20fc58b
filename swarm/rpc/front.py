"""One TCP port for gRPC and for the DHT: hands each connection on to one of the two, by its first byte.

A client of TLS begins with a record of type 22 (RFC 8446, 5.1), one of libp2p with the length of a line of multistream,
and one of gRPC without TLS with the preface of HTTP/2 (RFC 9113, 3.4). The two servers listen on the loopback, where
every connection would seem to come from this machine. So callers.py is told from which loopback port each connection
comes, and who is at its other end.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.errors import Overloaded
from swarm.rpc.callers import Caller, Quota, handed_on
from swarm.rpc.endpoint import LOOPBACK
from swarm.rpc.meeting.carrying import BUFFER_BYTES, Accepted, Kind, TcpLine, TcpStream

logger = logging.getLogger(__name__)

TLS, PLAIN, LIBP2P = b"\x16", b"P", b"\x13"
"""The first byte of a connection of gRPC with TLS or without, and of one of the DHT."""
FIRST_SECONDS = 10.0
"""Longest wait for the first byte."""
CONNECT_SECONDS = 5.0
"""Longest wait until the server on the loopback takes a connection."""
MAX_CONNECTIONS = 4096
"""The most connections at one time. One address, or one network of IPv6, may have an eighth of them."""
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A connection whose other end is gone is closed after about a minute. The servers on the loopback do not see that."""


class Front:
    """Listens on one port, and hands connections on to two ports of the loopback."""

    def __init__(self, grpc_port: int, dht_port: int) -> None:
        self._ports = {TLS: grpc_port, PLAIN: grpc_port, LIBP2P: dht_port}
        self._open = Quota("connections", MAX_CONNECTIONS, each=MAX_CONNECTIONS / 8)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Listen inside the block; at its end close all connections.

        Args:
            host: an IP address; empty for all of this machine's.

        Raises:
            ValueError: nothing can listen there; one line says why.
        """
        accepted = Accepted(self._serve, MAX_CONNECTIONS)
        try:
            server = await asyncio.start_server(accepted.take, host or None, port, limit=BUFFER_BYTES, backlog=256)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot listen on port {port}: {reason}; choose another --port") from None
        try:
            yield
        finally:
            server.close()
            await accepted.close()

    async def _serve(self, outer: TcpStream) -> None:
        try:
            await self._hand_on(outer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, Overloaded) as error:
            logger.debug("a connection is not handed on: %r", error)

    async def _hand_on(self, outer: TcpStream) -> None:
        reader, writer = outer
        _keep_alive(writer.get_extra_info("socket"))
        host, port, *_ = writer.get_extra_info("peername")
        caller = Caller(f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}")
        with self._open.taken(Caller(caller.rpartition(":")[0])):
            async with asyncio.timeout(FIRST_SECONDS):
                first = await reader.readexactly(1)
            if first not in self._ports:
                return
            with handed_on(caller) as source:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await asyncio.get_running_loop().sock_connect(source, (LOOPBACK, self._ports[first]))
                inner = await asyncio.open_connection(sock=source, limit=BUFFER_BYTES)
                inner[1].write(first)
                await TcpLine(inner, Kind.DIRECT).carry(outer)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        # Each system has some of these options.
        with contextlib.suppress(AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
