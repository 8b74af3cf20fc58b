"""A proxy through which the processes of a swarm connect (gRPC's `grpc_proxy`), so that their network can fail.

What passes from one process to another can be slowed down or held back, and their connections broken, so that replies
are lost after the work was done. Lines may also be long. The DHT does not use the proxy. TCP's congestion control does
not notice a line's length, because bytes are delayed after they were taken from the sender: slow start and the bound by
TCP's windows are missing. HTTP/2's windows see the whole distance.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from peers.local.supervisor import Child, Supervisor
from swarm.dht.launcher import LoopThread
from swarm.rpc.endpoint import host_and_port

CHUNK_BYTES = 16 * 1024
SOCKET_BYTES = 64 * 1024  # A socket's receive buffer, as small as a router's queue
SEGMENT_BYTES = 1400
"""As on Ethernet. With loopback's 64 KiB, the first bytes in flight alone would be a megabyte."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Link:
    """The proxy to which one process connects."""

    proxy: str  # host:port

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which gRPC connects through the proxy, even to localhost."""
        return {"grpc_proxy": f"http://{self.proxy}", "no_grpc_proxy": ""}


class DelayLine:
    """One direction of a long connection: bytes arrive in order, and never before bytes that were sent earlier."""

    def __init__(self, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop) -> None:
        self._writer = writer
        self._loop = loop
        self._under_way: deque[bytes] = deque()
        self._arrives_at = 0.0

    def send(self, chunk: bytes, seconds: float) -> None:
        self._arrives_at = max(self._arrives_at, self._loop.time() + seconds)
        self._under_way.append(chunk)
        # Timers that are due at the same time may run in any order, so each delivers the chunk that has waited longest.
        self._loop.call_at(self._arrives_at, self._arrive)

    async def end(self) -> None:
        """Wait until everything has arrived."""
        await asyncio.sleep(self._arrives_at - self._loop.time())
        while self._under_way:
            self._arrive()

    def _arrive(self) -> None:
        # Another timer may already have delivered this chunk.
        chunk = self._under_way.popleft() if self._under_way else b""
        if chunk and not self._writer.transport.is_closing():
            self._writer.write(chunk)


@dataclass(eq=False)
class Throttle:
    """The links of all processes. Bytes pass inside its `with` block."""

    round_trip_seconds: float = 0.0
    """The time that the length of the lines adds to each call and its answer. It may be changed at any time."""
    loop: LoopThread = field(default_factory=lambda: LoopThread("throttle"))
    _servers: list[asyncio.Server] = field(default_factory=list)
    _serving: dict[str, Link] = field(default_factory=dict)
    _obstacles: dict[tuple[Link, Link], tuple[float, ...]] = field(default_factory=dict)
    """For each sender and receiver, the bytes per second that each obstacle between them lets pass."""
    _removed: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: dict[asyncio.StreamWriter, tuple[Link, str]] = field(default_factory=dict)
    """For each end of a connection, the link of the process that made it, and the endpoint to which it leads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.loop.call_soon_threadsafe(self._abort)
        self.loop.close()

    def link(self) -> Link:
        return self.loop.run(self._listen())

    def serve(self, endpoint: str, link: Link) -> None:
        """Note that the process with this link serves `endpoint`."""
        self._serving[endpoint] = link

    def hinder(self, source: Link, target: Link, bytes_per_second: float = 0.0) -> None:
        """From now on let at most this many bytes per second pass. Bytes that wait are not lost."""
        self._obstacles[source, target] = (*self._obstacles.get((source, target), ()), bytes_per_second)

    def clear(self, source: Link, target: Link, bytes_per_second: float = 0.0) -> None:
        """Remove one such obstacle. Without obstacles everything passes again, the waiting bytes first."""
        rest = list(self._obstacles.pop((source, target)))
        rest.remove(bytes_per_second)
        if rest:
            self._obstacles[source, target] = tuple(rest)
        self.loop.loop.call_soon_threadsafe(self._wake)

    @property
    def num_obstacles(self) -> int:
        return len(self._obstacles)

    def break_connections(self, one: Link, other: Link) -> None:
        """Break the connections between two processes. Bytes that wait are lost."""
        self.loop.loop.call_soon_threadsafe(self._break, one, other)

    def _abort(self) -> None:
        for server in self._servers:
            server.close()
        for end in self._ends:
            end.transport.abort()

    def _wake(self) -> None:
        self._removed.set()
        self._removed = asyncio.Event()

    def _break(self, one: Link, other: Link) -> None:
        for end, (caller, endpoint) in list(self._ends.items()):
            if {caller, self._serving.get(endpoint)} == {one, other}:
                end.transport.abort()

    async def _listen(self) -> Link:
        listener = _socket()
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        link = Link(proxy=f"{host}:{port}")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(link, reader, writer)

        self._servers.append(await asyncio.start_server(connected, sock=listener, limit=CHUNK_BYTES))
        return link

    async def _connect(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            # The request is "CONNECT host:port HTTP/1.1". Its headers do not matter.
            endpoint = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            answers, requests = await _open(endpoint)
            writers.append(requests)
            self._ends |= dict.fromkeys(writers, (link, endpoint))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

            async with asyncio.TaskGroup() as pipes:
                pipes.create_task(self._pipe(reader, requests, lambda: (link, self._serving.get(endpoint))))
                pipes.create_task(self._pipe(answers, writer, lambda: (self._serving.get(endpoint), link)))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # One end is gone without closing, so the other end is closed.
        finally:
            for one in writers:
                self._ends.pop(one, None)
                one.close()

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        ends: Callable[[], tuple[Link | None, Link | None]],
    ) -> None:  # fmt: skip
        """Pass one direction on until its end of file. Raises OSError when either side fails."""
        delayed = DelayLine(writer, asyncio.get_running_loop())
        writer.transport.set_write_buffer_limits(high=CHUNK_BYTES)
        while chunk := await reader.read(CHUNK_BYTES):
            source, target = ends()
            if source and target:
                await self._pass_obstacle(source, target, len(chunk))
            delayed.send(chunk, self.round_trip_seconds / 2)
            await writer.drain()
        await delayed.end()
        writer.write_eof()

    async def _pass_obstacle(self, source: Link, target: Link, num_bytes: int) -> None:
        while obstacles := self._obstacles.get((source, target)):
            bytes_per_second = min(obstacles)
            with suppress(TimeoutError):
                async with asyncio.timeout(num_bytes / bytes_per_second if bytes_per_second else None):
                    await self._removed.wait()
                    continue
            return


class Lines(Supervisor):
    """Puts every child behind a line of its own."""

    def __init__(self, log_folder: Path, throttle: Throttle) -> None:
        super().__init__(log_folder)
        self.throttle = throttle
        self.links: dict[str, Link] = {}  # The link of each child, by its name

    def start(self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> Child:
        self.links[name] = link = self.throttle.link()
        return super().start(name, command, environment={**(environment or {}), **link.environment})


async def _open(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = _socket()
    try:
        await asyncio.get_running_loop().sock_connect(connection, host_and_port(endpoint))
    except OSError:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    return made
