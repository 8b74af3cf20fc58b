"""Punches a connection between two peers behind routers: both dial each other at one moment, from known ports.

Each asks a meeting point for the other's address, from the port from which it will dial; two SYN packets that cross
open both routers (TCP simultaneous open, RFC 9293, 3.5). If only one is behind a router, it reaches the other. By the
meeting point's secret each end proves that it is no stranger. Whatever a meeting point says, it cannot have this
machine dialled from within, nor bytes of its choice sent to anybody.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Iterable
from typing import Any

import grpc

from swarm.errors import SwarmError
from swarm.rpc.ask import Stream
from swarm.rpc.endpoint import endpoint_of, host_and_port, may_be_dialled, own_host
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.carrying import BUFFER_BYTES, Kind, Line, TcpLine, TcpStream
from swarm.rpc.meeting.dialler import Dialler, Points
from swarm.rpc.tls import BULK_OPTIONS
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceStub

logger = logging.getLogger(__name__)

MEETING_SECONDS = 6.0
"""Longest wait until both peers have asked the meeting point."""
PUNCH_SECONDS = 2.0
"""How long both sides dial."""
AGREE_SECONDS = 1.0
"""Longest wait until both ends of a new connection have proved that they know the secret."""
GREETING = b"swarm punch\n"
"""What the caller sends first, with a number of its own. The answer shows whether a peer is there that was called."""
_AGAIN_SECONDS = 0.1
_NUM_BYTES = 32
"""The length of the secret, the number and each proof."""


async def punch(points: Points, dialler: Dialler, point: Entry, request: pb.MeetRequest) -> Line | None:
    """Open a connection to the other peer; None if that fails. Cancelling leaves nothing behind. `point` is the meeting
    point that both peers ask. `request` names the peer to meet, or holds the token with which this peer was called."""
    is_caller = request.WhichOneof("message") == "to"
    try:
        family, address = await resolved(point)
    except (OSError, UnicodeError) as error:
        logger.debug("%s is not found: %s", point.endpoint, error)
        return None
    listener = _bound(family, 0)
    # This side may have no router. Then the other side reaches it here, from any port that the other side's router
    # chooses.
    listener.listen(4)
    local_port = listener.getsockname()[1]

    async def open_from_there() -> Line:
        return TcpLine(await _stream(await _connected(family, address, local_port)), Kind.DIRECT)

    target, proxy = dialler.route(open_from_there)
    line: Line | None = None
    try:
        async with asyncio.timeout(MEETING_SECONDS):
            channel = await points.connect(point, (*proxy, *BULK_OPTIONS), target=target)
        try:
            request.local = endpoint_of(own_host(family, address), local_port)
            reply = await _met(channel, request)
            # The call stays open while both dial, so that the router keeps the port.
            meeting = _Meeting(listener, family, reply.secret, is_caller=is_caller)
            async with asyncio.timeout(PUNCH_SECONDS):
                line = TcpLine(await meeting.first(candidates(reply, address[0])), Kind.PUNCHED)
        finally:
            await channel.close()
        return line
    except BaseException as error:
        if line is not None:
            await line.close()
        if not isinstance(error, SwarmError | OSError | TimeoutError | ValueError):
            raise
        logger.debug("not punched through %s: %r", point.endpoint, error)
        return None
    finally:
        dialler.forget(target)
        listener.close()


async def _met(channel: grpc.aio.Channel, request: pb.MeetRequest) -> pb.MeetReply:
    """Ask where the other peer is. The call stays open until the channel closes. Raises SwarmError, ValueError."""
    stub: Any = MeetingServiceStub(channel)
    async with Stream(stub.Meet(request)) as call:
        reply: pb.MeetReply = await call.read(MEETING_SECONDS)
    if len(reply.secret) != _NUM_BYTES:
        raise ValueError("the meeting point says nothing of use")
    return reply


def candidates(reply: pb.MeetReply, meeting_point: str) -> list[tuple[str, int]]:
    """Those addresses in a meeting point's reply that are dialled. Raises ValueError. `meeting_point` is its IP
    address."""
    ends = [host_and_port(endpoint) for endpoint in (reply.observed, reply.local) if endpoint]
    return [(host, port) for host, port in ends if may_be_dialled(host, meeting_point)]


class _Meeting:
    """One side of two peers that dial each other."""

    def __init__(self, listener: socket.socket, family: int, secret: bytes, *, is_caller: bool) -> None:
        self._listener = listener
        self._family = family
        self._secret = secret
        self._is_caller = is_caller
        self._agreeing = asyncio.Lock()
        """Held while the caller offers a connection: it offers one after the other, so that both take the same one."""

    async def first(self, candidates: Iterable[tuple[str, int]]) -> TcpStream:
        """The first connection on which both agree, whichever side opened it. Cancelling closes all connections."""
        work = [self._arrival(), *(self._departure(candidate) for candidate in candidates)]
        tasks = [asyncio.ensure_future(part) for part in work]
        winner = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            winner = next(iter(done))
            return winner.result()
        finally:
            for task in tasks:
                task.cancel()
            # The tasks end before the listener is closed, or the loop would go on watching its descriptor, which the
            # next socket may get.
            for task, end in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                if task is not winner and not isinstance(end, BaseException):
                    end[1].close()

    async def _arrival(self) -> TcpStream:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return await self._agreed(sock)

    async def _departure(self, address: tuple[str, int]) -> TcpStream:
        local_port = self._listener.getsockname()[1]
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return await self._agreed(await _connected(self._family, address, local_port))
            # The connection was refused: the other side has not dialled yet, and its router answers strangers.
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _agreed(self, sock: socket.socket) -> TcpStream:
        """The stream over a connection, if both ends know the secret. Raises OSError, IncompleteReadError."""
        reader, writer = await _stream(sock)
        try:
            async with asyncio.timeout(AGREE_SECONDS):
                if self._is_caller:
                    async with self._agreeing:
                        number = secrets.token_bytes(_NUM_BYTES)
                        writer.write(GREETING + number)
                        await _require(reader, self._proof(b"called", number))
                        writer.write(self._proof(b"caller", number))
                else:
                    await _require(reader, GREETING)
                    number = await reader.readexactly(_NUM_BYTES)
                    writer.write(self._proof(b"called", number))
                    await _require(reader, self._proof(b"caller", number))
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def _proof(self, end: bytes, number: bytes) -> bytes:
        return hmac.digest(self._secret, end + number, "sha256")


async def _require(reader: asyncio.StreamReader, expected: bytes) -> None:
    if not hmac.compare_digest(await reader.readexactly(len(expected)), expected):
        raise ConnectionRefusedError("a stranger")


def _bound(family: int, local_port: int) -> socket.socket:
    """A socket at a port that several sockets share: one listens there, and others connect from there."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", local_port))
    return sock


async def _connected(family: int, address: tuple[str, int], local_port: int) -> socket.socket:
    sock = _bound(family, local_port)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _stream(sock: socket.socket) -> TcpStream:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await asyncio.open_connection(sock=sock, limit=BUFFER_BYTES)


async def resolved(point: Entry) -> tuple[int, tuple[str, int]]:
    """The address family and the address of a meeting point. Raises OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    family, *_, address = (await loop.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM))[0]
    return family, (str(address[0]), int(address[1]))
