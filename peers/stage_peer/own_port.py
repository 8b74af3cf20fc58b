"""Answers at a TCP port of this machine while no server of the process listens there.

Used by reach.py and dht_reach.py: others dial a peer back at its ports before its server begins, between two servers,
and while its node of the DHT does not listen. Also used by swarm-doctor, which never serves.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from swarm.credentials.identity import Identity
from swarm.rpc import tls
from swarm.rpc.meeting.check import MULTISTREAM
from swarm.rpc.serving import SERVER_OPTIONS, bind_server


def reserved(host: str) -> socket.socket:
    """Reserve a free port for this process. Raises ValueError if the host is no address of this machine."""
    try:
        return _bound(host, 0)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}: {error.strerror}; choose another --host") from None


@asynccontextmanager
async def answering(host: str, port: int, own: Identity, *, insecure: bool) -> AsyncIterator[None]:
    """Run a server without services at a port inside the block, with this process's certificate.

    Raises:
        ValueError: the port is in use, or the host is no address of this machine.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    bind_server(server, host, port, None if insecure else tls.server_credentials(own))
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)
        # gRPC closes its socket a moment after `stop` has returned, and the next server needs the port.
        while is_listened_on(host, port):  # noqa: ASYNC110 - nothing tells of it.
            await asyncio.sleep(0.01)


@asynccontextmanager
async def answering_as_node(host: str, port: int) -> AsyncIterator[None]:
    """Answer at a port inside the block with the first line of a DHT node's protocol, and nothing else.

    Raises:
        OSError: the port is in use.
    """

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(MULTISTREAM)
            await writer.drain()
            writer.close()

    async with await asyncio.start_server(greet, host or None, port):
        yield


def is_listened_on(host: str, port: int) -> bool:
    """Whether a server listens on the port."""
    try:
        with _bound(host, port) as sock:
            sock.listen()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _bound(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen, so that a server of this process can still take the port. Raises OSError."""
    family = socket.AF_INET6 if ":" in (host or "::") and socket.has_dualstack_ipv6() else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
