"""Opens connections: those that gRPC cannot open by itself, and those to meeting points."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

import grpc

from swarm.credentials.identity import Identity
from swarm.errors import SwarmError
from swarm.rpc import tls
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.carrying import BUFFER_BYTES, Accepted, Line, TcpStream
from swarm.rpc.tls import BULK_OPTIONS, Options, through
from swarm.types import PeerId

logger = logging.getLogger(__name__)

Opener = Callable[[], Awaitable[Line]]
"""Opens a connection. May raise SwarmError, OSError or TimeoutError."""

_HEAD_SECONDS = 5.0
_MAX_CONNECTIONS = 1024


class Dialler:
    """The proxy that opens connections for a channel pool, or for a peer that waits at meeting points.

    gRPC for Python takes no connection that is open already. But for a channel with the option grpc.http_proxy a proxy
    opens the connections, by HTTP CONNECT, and this is one, inside the process. It gives each channel a secret name, by
    which it finds the function that opens the channel's connections.
    """

    def __init__(self) -> None:
        self._openers: dict[str, Opener] = {}
        self._listening: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._connections = Accepted(self._connect, _MAX_CONNECTIONS)

    def route(self, opener: Opener) -> tuple[str, Options]:
        """The target and the option of a channel whose connections `opener` opens. Must run in the event loop."""
        if self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
            self._serving = asyncio.get_running_loop().create_task(self._serve(self._listening))
        name = secrets.token_hex(16)
        self._openers[name] = opener
        return f"{name}:1", through(f"127.0.0.1:{self._listening.getsockname()[1]}")

    def forget(self, target: str) -> None:
        """Open no more connections for a channel; those that are open stay."""
        self._openers.pop(target.partition(":")[0], None)

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._connections.close()
        if self._listening is not None:
            self._listening.close()

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._connections.take, sock=listening, limit=BUFFER_BYTES)
        async with server:
            await server.serve_forever()

    async def _connect(self, stream: TcpStream) -> None:
        reader, writer = stream
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            # The request is CONNECT name:1 HTTP/1.1, with headers that do not matter.
            opener = self._openers[head.split()[1].rpartition(b":")[0].decode()]
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, LookupError, ValueError):
            return
        try:
            line = await opener()
        except (SwarmError, OSError, TimeoutError) as error:
            logger.debug("no connection: %s", error)
            # 504, a gateway's timeout: rpc/failures takes it for "out of reach", not for "the process has died".
            writer.write(b"HTTP/1.1 504 no way\r\n\r\n")
            with contextlib.suppress(OSError):
                await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await line.carry(stream)


class Points:
    """The meeting points that one process has been connected to.

    Each use has a connection of its own, so that bytes of one use do not hold up another. A meeting point's certificate
    is asked for once, and then pinned. If this process is itself the meeting point, it calls the waiting peer without
    any connection: a router often does not lead from within to its own outer address.
    """

    def __init__(self, own: Identity | None, *, insecure: bool, run_id: str = "") -> None:
        """`run_id` is the run of this process, which meeting points are told; empty while that is not known."""
        self.run_id = run_id
        self._own = own
        self._insecure = insecure
        self._certificates: dict[Entry, str] = {}
        self._open_here: Callable[[PeerId], Awaitable[Line]] | None = None

    def serve_here(self, open_line: Callable[[PeerId], Awaitable[Line]]) -> None:
        """From now on this process is a meeting point, and `open_line` connects it to a peer that waits here."""
        self._open_here = open_line

    def here(self, point: Entry) -> Callable[[PeerId], Awaitable[Line]] | None:
        """What connects to the peers that wait at a meeting point, if it is this process; None if it is another."""
        return self._open_here if self._own is not None and point.peer_id == self._own.peer_id else None

    async def connect(self, point: Entry, options: Options = BULK_OPTIONS, *, target: str = "") -> grpc.aio.Channel:
        """Open a new channel to a meeting point, or to `target` instead of its endpoint. With the options for bulk
        transfers it shares no connection with other channels.

        Raises PeerUnavailable if the meeting point does not answer, or another peer does; ValueError if the run is
        locked, and there is no token.
        """
        if not self._insecure and point not in self._certificates:
            self._certificates[point] = await point.certificate(self._own)
        certificate_pem = None if self._insecure else self._certificates[point]
        return tls.open_channel(target or point.endpoint, certificate_pem, self._own, options)

    def forget(self, point: Entry) -> None:
        """Drop a meeting point's certificate, so that the next connection asks for it: it may have changed."""
        self._certificates.pop(point, None)
