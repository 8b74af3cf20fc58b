"""Lines to a peer, which carry the bytes of a connection in both directions, and how much of it a meeting point does.

A line is a TCP connection, or a call that carries one: to a meeting point, or from the peer to this process if that is
the meeting point. The bytes are TLS between others; nothing here looks at them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

import grpc

from swarm.machine.clock import Clock
from swarm.rpc.ask import Stream
from swarm.rpc.callers import Caller, Quota
from swarm.rpc.v1 import meeting_pb2 as pb

PIECE_BYTES = 256 << 10
"""The largest piece of a connection in one message."""
BUFFER_BYTES = 1 << 20
"""The limit of a StreamReader. With asyncio's default of 64 KiB, carrying takes twice the processor time."""
BURST_SECONDS = 0.25
"""A caller may send at once the part of its share that it did not use within this time."""
RETRY_SECONDS = 5.0
"""How long a caller that was refused waits before it asks again."""

TcpStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Accepted:
    """The connections that a listening socket has accepted, a task for each."""

    def __init__(self, serve: Callable[[TcpStream], Coroutine[Any, Any, None]], max_connections: int) -> None:
        self._serve = serve
        self._max_connections = max_connections
        self._tasks = set[asyncio.Task[None]]()
        self._is_closed = False

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: the callback of asyncio.start_server. As a coroutine it would be a task that `close`
        does not know until it begins."""
        if self._is_closed or len(self._tasks) >= self._max_connections:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve((reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Also if the task is cancelled before it begins.
        task.add_done_callback(lambda _: writer.close())

    async def close(self) -> None:
        self._is_closed = True
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Kind(StrEnum):
    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


class TcpLine:
    def __init__(self, stream: TcpStream, kind: Kind) -> None:
        self.kind = kind
        self._stream = stream

    async def carry(self, stream: TcpStream) -> None:
        """Pass bytes between this line and a connection until one of them ends. Closes both, also when cancelled."""
        try:
            await first_of(_pump(stream[0], self._stream[1]), _pump(self._stream[0], stream[1]))
        finally:
            stream[1].close()
            self._stream[1].close()

    async def close(self) -> None:
        self._stream[1].close()


class CallLine:
    """A call, Connect or Take, with which a meeting point carries a connection."""

    kind = Kind.RELAYED

    def __init__(self, call: Any, channel: grpc.aio.Channel) -> None:
        self._call = call
        self._channel = channel

    @classmethod
    async def opened(cls, call: Any, channel: grpc.aio.Channel, opening: pb.Carried, seconds: float) -> Self:
        """Send the call's first message, and return the line once the meeting point has connected both ends, within so
        many seconds; if that fails, close the channel. Raises the meeting point's refusal, or PeerUnavailable if it
        does not answer."""
        try:
            async with Stream(call) as stream:
                await stream.write(opening, seconds)
                await stream.read(seconds)
        except BaseException:
            await channel.close()
            raise
        return cls(call, channel)

    async def carry(self, stream: TcpStream) -> None:
        try:
            await first_of(self._send(stream[0]), self._receive(stream[1]))
        finally:
            stream[1].close()
            await self.close()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(PIECE_BYTES):
            await self._call.write(pb.Carried(data=data))

    async def _receive(self, writer: asyncio.StreamWriter) -> None:
        while (piece := await self._call.read()) is not grpc.aio.EOF:
            writer.write(piece.data)
            await writer.drain()


class Line(Protocol):
    @property
    def kind(self) -> Kind: ...
    async def carry(self, stream: TcpStream) -> None: ...

    async def close(self) -> None: ...


async def first_of(*work: Coroutine[Any, Any, object]) -> None:
    """Run all until the first one ends, then cancel the others. An error counts as an end, and is not raised."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # One end may be gone at any time.
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()


@dataclass(frozen=True, kw_only=True)
class MeetingLimits:
    """The most that a meeting point does for peers that others do not reach. One caller gets half of each number."""

    max_waiting: int = 128
    """Peers that may wait here at one time; 0 lets none wait."""
    max_connections: int = 256
    """Connections that are carried at one time."""
    bytes_per_second: float = 25e6
    """The rate at which all callers' bytes together are carried. Those that send at one moment have equal parts."""
    share_while_exchanging: float = 0.25
    """The share of `bytes_per_second` that callers may have while this peer averages: its own round comes first."""

    @classmethod
    def of(cls, megabits_per_second: int) -> "MeetingLimits":
        """The limits of a meeting point that may carry this many megabits per second; nothing for 0."""
        return cls(bytes_per_second=megabits_per_second * 125_000.0) if megabits_per_second else cls(max_waiting=0)


class Budget:
    """How much one meeting point carries: connections and bytes per second, for each caller and in all.

    Bytes that a caller sends beyond its share wait; connections beyond the limit are refused. A caller is the bearer of
    a token, or an address, since there may be any number of peer ids.
    """

    def __init__(self, limits: MeetingLimits, clock: Clock, is_exchanging: Callable[[], bool]) -> None:
        self._limits = limits
        self._clock = clock
        self._is_exchanging = is_exchanging
        self._connections = Quota("connections", limits.max_connections, retry_seconds=RETRY_SECONDS)
        self._sent = Quota("seconds of the line", each=BURST_SECONDS, per_second=1.0, clock=clock)
        """A caller that has some of it counts as sending."""
        self.num_bytes = 0
        """How many bytes were carried since this peer began to serve its stage."""

    @property
    def num_connections(self) -> int:
        return int(self._connections.total)

    def connection(self, caller: Caller) -> AbstractContextManager[None]:
        """Counts a connection while the block runs. Raises Overloaded if there are too many."""
        return self._connections.taken(caller)

    async def spend(self, caller: Caller, num_bytes: int) -> None:
        """Wait until `num_bytes` of a caller may be passed on. Cancelling ends the wait."""
        senders = {caller, *self._sent.callers}
        share = self._limits.share_while_exchanging if self._is_exchanging() else 1.0
        rate = self._limits.bytes_per_second * share / len(senders)
        self.num_bytes += num_bytes
        if seconds := self._sent.wait_seconds(caller, num_bytes / rate):
            await self._clock.sleep(seconds)
