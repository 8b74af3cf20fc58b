"""Gives each process of this machine a home line of its own: one line for all that it sends, one for all that it
receives.

This is a user-space proxy for chaos and for the benches that run over lines. Each process connects through a port of
its own (gRPC does this with HTTP CONNECT if its environment says so). So the proxy knows which process calls which.
Bytes between two processes pass over the sender's up line and the receiver's down line. All connections of a process
queue there chunk by chunk, each with one chunk at a time, so they share its lines evenly.

The bytes from one process to another can also be slowed down further, or held back, and their connections can be
broken. In this way links become slow or stall, in one direction or both, and replies are lost after the work was done.
The limit holds for the bytes that TCP carries, TLS included, without TCP's own headers. The DHT does not use the proxy.

What one process sends to another can be slowed further, or held back for good or for a while, and their connections
can be broken. So links are slow or stalled, one way or both, and replies are lost after the work was done.

For each connection and direction the proxy holds about 0.1 MB, like a router with a short queue. Before the proxy, the
sender's kernel holds up to 1.6 MB, as it does before a real line of 50 Mb/s.

Lines may also be long. Then bytes arrive half a round trip after they have passed the line, and as many bytes as fit
are under way. The proxy delays bytes after it has taken them from the sender, so TCP does not notice the distance: its
congestion control sees the round trips of this machine. A real long line has costs that are missing here: slow start at
the beginning of a connection, after each pause and after a loss, and the limit by TCP's windows. The windows of HTTP/2,
which gRPC uses, see the whole distance.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from swarm.dht.loop_thread import LoopThread
from swarm.rpc.endpoint import host_and_port

CHUNK_BYTES = 16 * 1024
SOCKET_BYTES = 64 * 1024
"""The size of a socket's receive buffer."""
SEGMENT_BYTES = 1400
"""The size of a segment, as on Ethernet. With loopback's 64 KiB, the first bytes in flight alone would be a
megabyte."""
BURST_SECONDS = 0.02
"""How much time an idle line may catch up, because a busy machine wakes tasks too late."""


class Line:
    """One direction of a link."""

    def __init__(self, bytes_per_second: float) -> None:
        self.num_bytes = 0
        """The bytes that have passed this line."""
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def queue(self, num_bytes: int, now: float) -> float:
        """Put bytes at the end of the queue. Return the time at which they have passed."""
        self.num_bytes += num_bytes
        self._free_at = max(self._free_at, now - BURST_SECONDS) + num_bytes / self._bytes_per_second
        return self._free_at


@dataclass(frozen=True, kw_only=True, eq=False)
class Link:
    """The two lines of a process, and the proxy to which it connects to use them."""

    up: Line
    down: Line
    proxy: str
    """host:port."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which gRPC connects through the proxy, even to localhost."""
        return {"grpc_proxy": f"http://{self.proxy}", "no_grpc_proxy": ""}


class DelayLine:
    """One direction of a long connection: all bytes arrive with the same delay, and in order."""

    def __init__(self, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop) -> None:
        self._writer = writer
        self._loop = loop
        self._under_way: deque[bytes] = deque()
        self._arrives_at = 0.0

    def send(self, chunk: bytes, seconds: float) -> None:
        """Let bytes arrive after this time, but never before bytes that were sent earlier."""
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

    bytes_per_second: float
    """The rate of each line."""
    round_trip_seconds: float = 0.0
    """The time that the length of the lines adds to each call and its answer. It may be changed at any time."""
    loop: LoopThread = field(default_factory=lambda: LoopThread("throttle"))
    _servers: list[asyncio.Server] = field(default_factory=list)
    _serving: dict[str, Link] = field(default_factory=dict)
    _obstacles: dict[tuple[Link, Link], tuple[float, ...]] = field(default_factory=dict)
    """For each sender and receiver, the bytes per second that each obstacle between them lets pass."""
    _removed: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: dict[asyncio.StreamWriter, tuple[Link, str]] = field(default_factory=dict)
    """For each end of a connection, the link of the process that made the connection, and the endpoint to which it
    leads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.loop.loop.call_soon_threadsafe(self._abort)
        self.loop.close()

    def link(self) -> Link:
        """Make a new link."""
        return self.loop.run(self._listen())

    def serve(self, endpoint: str, link: Link) -> None:
        """Let what others exchange with `endpoint` also pass the lines of `link`, whose process serves it."""
        self._serving[endpoint] = link

    def hinder(self, source: Link, target: Link, bytes_per_second: float = 0.0) -> None:
        """From now on let at most this many bytes per second pass from one process to another. Bytes that wait are not
        lost."""
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
        """The number of pairs of sender and receiver that have an obstacle."""
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
        up, down = Line(self.bytes_per_second), Line(self.bytes_per_second)
        link = Link(up=up, down=down, proxy=f"{host}:{port}")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(link, reader, writer)

        self._servers.append(await asyncio.start_server(connected, sock=listener, limit=CHUNK_BYTES))
        return link

    async def _connect(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection from a process until either end closes it."""
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
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: Callable[[], tuple[Link | None, Link | None]],
    ) -> None:
        """Pass one direction on until its end of file. Raises OSError when either side fails."""
        time = asyncio.get_running_loop().time
        delayed = DelayLine(writer, asyncio.get_running_loop())
        writer.transport.set_write_buffer_limits(high=CHUNK_BYTES)
        while chunk := await reader.read(CHUNK_BYTES):
            source, target = ends()
            lines = [*([source.up] if source else []), *([target.down] if target else [])]
            passed_at = max(line.queue(len(chunk), time()) for line in lines)
            await asyncio.sleep(passed_at - time())
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


async def _open(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = _socket()
    try:
        await asyncio.get_running_loop().sock_connect(connection, host_and_port(endpoint))
    except OSError:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)


def _socket() -> socket.socket:
    """A TCP socket with a receive buffer as small as a router's queue."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    return made
