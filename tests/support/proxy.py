"""A bad network in front of one address: an asyncio TCP proxy with stalls, cuts and losses.

Tests put it between two real endpoints and change its knobs while traffic flows.
"""

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

_CHUNK_BYTES = 64 * 1024


class Direction(StrEnum):
    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass(kw_only=True)
class Link:
    """One direction of every connection. Set the fields whenever you like."""

    bytes_per_second: float = float("inf")
    """Each connection's share, not the sum of them."""
    largest_bytes: int = _CHUNK_BYTES
    """The most bytes that may be written at once. Larger writes are lost, with all that follows on that connection, as
    with TCP over a path that drops large packets."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """While cleared, bytes are held back: see Proxy.stall."""
    num_bytes: int = 0
    """The number of bytes that were passed on."""


class Proxy:
    """Listens on a free port of localhost and passes everything on to `host:port`."""

    def __init__(self, host: str, port: int) -> None:
        self.links = {direction: Link() for direction in Direction}
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._refusing = False
        self.resume()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_CHUNK_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        connections = list(self._connections)
        self.cut()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        assert self._server is not None, "enter the proxy first"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def stall(self) -> None:
        """Hold all bytes back until `resume`. Nothing is lost."""
        for link in self.links.values():
            link.open.clear()

    def resume(self) -> None:
        for link in self.links.values():
            link.open.set()

    def cut(self) -> None:
        """Reset every open connection, on both sides; new ones are still accepted."""
        for connection, writers in self._connections.items():
            for writer in writers:
                reset(writer)
            connection.cancel()

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections as soon as they are made."""
        self._refusing = refusing

    async def _serve(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            reset(client_writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target, limit=_CHUNK_BYTES)
        except OSError:
            reset(client_writer)
            return
        writers = (client_writer, server_writer)
        connection = asyncio.current_task()
        assert connection is not None
        self._connections[connection] = writers
        try:
            async with asyncio.TaskGroup() as pipes:
                pipes.create_task(_pipe(client_reader, server_writer, self.links[Direction.TO_SERVER]))
                pipes.create_task(_pipe(server_reader, client_writer, self.links[Direction.TO_CLIENT]))
        except* OSError:
            # One side has gone without closing, so the other side is closed as well.
            for writer in writers:
                reset(writer)
        finally:
            del self._connections[connection]
            for writer in writers:
                writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST instead of FIN, as a crashed machine's router would."""
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
    """Pass one direction on until its end of file. Raises OSError when either side fails."""
    is_stuck = False
    while chunk := await reader.read(_CHUNK_BYTES):
        await link.open.wait()
        is_stuck = is_stuck or len(chunk) > link.largest_bytes
        if is_stuck:
            continue
        link.num_bytes += len(chunk)
        writer.write(chunk)
        await writer.drain()
        await asyncio.sleep(len(chunk) / link.bytes_per_second)
    await link.open.wait()
    writer.write_eof()
