"""The server's side of gRPC: the port at which it listens, and the messages of a stream, each with a deadline.

Also the check that every service makes first, and the one port that gRPC may share with the DHT (Front).
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from swarm.errors import DeadlineExceeded, IncompatibleVersion, Overloaded, WrongRun, WrongStage
from swarm.rpc.callers import MAX_CALLS, Caller, Quota, handed_on
from swarm.rpc.endpoint import LOOPBACK, endpoint_of
from swarm.rpc.meeting.carrying import BUFFER_BYTES, Accepted, Kind, TcpLine, TcpStream
from swarm.rpc.tls import MAX_MESSAGE_BYTES, Options, pings
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOLS, Block, Protocols

logger = logging.getLogger(__name__)

_Message = TypeVar("_Message")
Context = Any
"""Stands for grpc.aio.ServicerContext, which has other type arguments in each call."""
MESSAGE_SECONDS = 30.0
"""How long a server waits at most for the next message of a stream, and for its caller to take one."""


def server_options(silence_ms: int, answer_ms: int) -> Options:
    """Options of a server that pings a caller with a call under way after a silence, and breaks the connection if the
    answer takes too long: a frozen caller's calls would otherwise wait for it."""
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # The most calls on one connection; gRPC itself holds further ones back, or refuses them.
        ("grpc.max_concurrent_streams", MAX_CALLS),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # Otherwise two servers could share one port, and get each other's calls.
        ("grpc.so_reuseport", 0),
        *pings(silence_ms, answer_ms),
    )


SERVER_OPTIONS = server_options(10_000, 30_000)
"""On a slow line a ping, and its answer, wait behind megabytes."""
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


def check_address(address: Address, *, run_id: str, block: Block) -> None:
    """Raise IncompatibleVersion, WrongRun or WrongStage unless a request names a protocol that this release speaks, and
    this run and block."""
    if not PROTOCOLS.meets(theirs := Protocols.of(address)):
        raise IncompatibleVersion(
            f"the caller speaks protocol {theirs}, and this peer {PROTOCOLS}: update the older one of the two"
        )
    if address.run_id != run_id:
        raise WrongRun(f"run {address.run_id[:80]!r} is not {run_id!r}, which this peer serves")
    require_block(Block(address.stage, address.variant), block)


def require_block(asked: Block, block: Block) -> None:
    """Raise WrongStage unless the block that is asked for is the one that is served."""
    if asked != block:
        raise WrongStage(f"this peer serves stage {block}, not {asked}")


def bind_server(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Let a server, made with SERVER_OPTIONS, listen on a port, and return the port; 0 takes a free one. Without
    credentials there is no TLS. An empty host stands for all addresses of this machine, IPv4 and IPv6.

    Raises ValueError if the port is in use, or the host is no address of this machine.
    """
    address = endpoint_of(host or "::", port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ValueError(
            f"cannot listen on {address}: the port is in use, or the address is not this machine's; choose another"
        ) from None


async def start_server(server: grpc.aio.Server) -> None:
    """Start a server. If that is cancelled, the server has started all the same, so that it can be stopped."""
    # Were grpc.aio itself cancelled here, its server could not be stopped, and would log an error at its end.
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        raise


async def send(context: Any, message: Any, seconds: float = MESSAGE_SECONDS) -> None:
    """Send a message to the caller over the stream whose ServicerContext is `context`. Raises DeadlineExceeded if the
    caller takes nothing."""
    try:
        async with asyncio.timeout(seconds):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded(f"the caller took nothing for {seconds:.0f} s") from None


async def receive(context: Any, seconds: float = MESSAGE_SECONDS) -> Any:
    """Wait for the next message of the stream whose ServicerContext is `context`; None at its end. Raises
    DeadlineExceeded if the caller sends nothing."""
    message = await in_time(context.read(), seconds)
    return None if message is grpc.aio.EOF else message


async def in_time(reading: Awaitable[_Message], seconds: float) -> _Message:
    """Wait for a message. Raises DeadlineExceeded if it does not come within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        raise DeadlineExceeded(f"no message for {seconds:.0f} s") from None


class Front:
    """Listens on one port, and hands each connection on to gRPC or to the DHT, by its first byte.

    A client of TLS begins with a record of type 22 (RFC 8446, 5.1), one of libp2p with the length of a line of
    multistream, and one of gRPC without TLS with the preface of HTTP/2 (RFC 9113, 3.4). The two servers listen on the
    loopback, where every connection would seem to come from this machine. So callers.py is told from which loopback
    port each connection comes, and who is at its other end.
    """

    def __init__(self, grpc_port: int, dht_port: int) -> None:
        self._ports = {TLS: grpc_port, PLAIN: grpc_port, LIBP2P: dht_port}
        self._open = Quota("connections", MAX_CONNECTIONS, each=MAX_CONNECTIONS / 8)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Listen inside the block; at its end close all connections. `host` is an IP address; empty for all of this
        machine's. Raises ValueError if nothing can listen there; one line says why."""
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
