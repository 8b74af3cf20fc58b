"""Answers at a TCP port of this machine while no server of the process listens there.

Others dial a peer back at its ports before its server begins, between two servers, and while its node of the DHT does
not listen. OwnPort lets one server at a time have the gRPC port.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Never

import grpc

from swarm.credentials.identity import Identity
from swarm.rpc import tls
from swarm.rpc.meeting.check import DIAL_SECONDS, MULTISTREAM
from swarm.rpc.serving import SERVER_OPTIONS, bind_server, start_server

FREE_SECONDS = 5.0
"""Longest wait until gRPC has closed the socket of a server that has stopped."""


class OwnPort:
    """The gRPC port of one peer. Whenever no server of the peer has it, one without services answers there."""

    def __init__(self, host: str, port: int, own: Identity, *, insecure: bool) -> None:
        """
        Args:
            port: a number; if it is 0, a free port is taken and kept for this process.

        Raises:
            ValueError: the host is no address of this machine.
        """
        self._reserved = None if port else reserved(host)
        self.number: int = port if self._reserved is None else self._reserved.getsockname()[1]
        self.is_answered = asyncio.Event()
        """Set once something of this process listens at the port."""
        self._host = host
        self._own = own
        self._insecure = insecure
        self._taking = asyncio.Lock()
        """Held by what has the port. Of those that wait for it, the first one gets it."""
        self._is_wanted = asyncio.Event()

    async def answer(self) -> Never:
        """Answer, except inside `held`, until cancelled. Raises ValueError if another process has the port."""
        try:
            while True:
                async with self._taking, answering(self._host, self.number, self._own, insecure=self._insecure):
                    self.is_answered.set()
                    await self._is_wanted.wait()
        finally:
            if self._reserved is not None:
                self._reserved.close()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Have the port inside the block, for a server that has stopped by its end."""
        self._is_wanted.set()
        async with self._taking:
            self._is_wanted.clear()
            self.is_answered.set()
            try:
                yield
            finally:
                await _until_free(self._host, self.number)


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
    try:
        await start_server(server)
        yield
    finally:
        await server.stop(None)
        await _until_free(host, port)


async def _until_free(host: str, port: int) -> None:
    """Wait until the next server can have the port: gRPC closes its socket a moment after `stop` has returned."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FREE_SECONDS):
            while is_listened_on(host, port):  # noqa: ASYNC110 - nothing tells of it.
                await asyncio.sleep(0.01)


@asynccontextmanager
async def answering_as_node(host: str, port: int) -> AsyncIterator[None]:
    """Answer at a port inside the block with the first line of a DHT node's protocol, and nothing else.

    Raises:
        OSError: the port is in use.
    """

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.write(MULTISTREAM)
            await writer.drain()
            # To close with bytes unread would reset the connection, and the line might be lost with it.
            async with asyncio.timeout(DIAL_SECONDS):
                await reader.readexactly(len(MULTISTREAM))
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
