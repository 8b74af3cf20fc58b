"""What answers at this machine's two ports while no server of the process, and no node of the DHT, listens there.

Others dial a peer back before its server begins, and while its node of the DHT is a client.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Never

import grpc

from peers.reach.listen import Listen, Outside
from swarm.credentials.identity import Identity
from swarm.dht import addresses
from swarm.dht.node import DhtNode
from swarm.errors import SwarmError
from swarm.rpc import tls
from swarm.rpc.endpoint import endpoint_of, host_and_port
from swarm.rpc.meeting.check import DIAL_SECONDS, MAX_ENDPOINTS, MULTISTREAM
from swarm.rpc.serving import SERVER_OPTIONS, bind_server, start_server

logger = logging.getLogger(__name__)

FREE_SECONDS = 5.0
"""Longest wait until gRPC has closed the socket of a server that has stopped."""


class OwnPort:
    """The gRPC port of one peer. Whenever no server of the peer has it, one without services answers there."""

    def __init__(self, host: str, port: int, own: Identity, *, insecure: bool) -> None:
        """`port` is a number; if it is 0, a free port is taken and kept for this process. Raises ValueError if the host
        is no address of this machine."""
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
    """Run a server without services at a port inside the block, with this process's certificate. Raises ValueError if
    the port is in use, or the host is no address of this machine."""
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
    """Answer at a port inside the block with the first line of a DHT node's protocol, and nothing else. Raises OSError
    if the port is in use."""

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


class DhtReach:
    """How others reach one peer's node of the DHT. One that nobody reaches goes on as a client, which does not listen.

    While others dial a client back, `answering_as_node` listens at the node's port in its place. If they reach it, the
    node becomes a full node again, which others ask.
    """

    def __init__(self, node: DhtNode, listen: Listen) -> None:
        self.addresses = listen.dht_addresses
        """Where others are told to enter the DHT, the best first; none while the node is a client."""
        self.port = listen.dht_port if listen.dht_addresses else 0
        """The TCP port of this machine at which others reach the node; 0 if it has never been asked."""
        self._node = node
        self._place = listen.node
        self._named = listen.dht_addresses
        self._own = {one.host for one in listen.own}

    @property
    def named(self) -> str:
        return ", ".join(endpoint_of(*place) for place in map(addresses.place, self._named))

    def moved(self, own: Sequence[Outside]) -> None:
        """Name the addresses that the machine has now in place of its former ones. Those that the user named stay."""
        if self._named:
            kept = [named for named in self._named if addresses.place(named)[0] not in self._own]
            new = [self._at(one.host, self.port) for one in own]
            self._named, self._own = (*kept, *new), {one.host for one in own}

    @asynccontextmanager
    async def answering(self, forwarded_port: int | None) -> AsyncIterator[Sequence[str]]:
        """Make sure that the node's port answers inside the block. Yields the endpoints that others are to dial; none
        if the port cannot answer. `forwarded_port` is the router's port that leads to the node's; None if the router
        forwards none.
        """
        places = [addresses.place(address) for address in self.addresses or self._named][: MAX_ENDPOINTS - 1]
        # Others also try the address from which they see this peer call.
        seen = [f":{forwarded_port or port}" for _, port in places[:1]]
        ends = [*(endpoint_of(*place) for place in places), *seen]
        async with AsyncExitStack() as stack:
            if places and not self.addresses:
                try:
                    await stack.enter_async_context(answering_as_node(*self._place))
                except OSError as error:
                    logger.debug("the port of the DHT's node is taken: %s", error)
                    ends = []
            yield ends

    def is_forwarded_from(self, host: str, port: int) -> None:
        """Announce the node at a router's address too, while nobody can say whether it is reached there."""
        if self.addresses and port:
            self.addresses = (self._at(host, port), *self.addresses)

    async def conclude(self, reached: Sequence[str]) -> None:
        """Announce the node at these endpoints. If there are none, make the node a client, which nobody asks. `reached`
        are the endpoints at which others reached the node's port, the best first."""
        if not reached and self.addresses:
            self.addresses = ()
            logger.info(
                "others do not reach its node of the DHT at %s: from now on it asks, and is not asked", self.named
            )
            await self._become(client_mode=True)
        if not reached or not self._named:
            return
        if not self.addresses:
            if not await self._become(client_mode=False):
                return
            logger.info("others reach its node of the DHT at %s by now: from now on it is asked again", reached[0])
        found = (self._at(*host_and_port(end)) for end in reached)
        # Nobody outside reaches the machine's own, which are for processes on it and in its network.
        own = (named for named in self._named if addresses.place(named)[0] in self._own)
        self.addresses = tuple(dict.fromkeys([*found, *own]))

    def _at(self, host: str, port: int) -> str:
        _, libp2p_id = addresses.split(self._named[0])
        return f"{addresses.at(host, port)}/p2p/{libp2p_id}"

    async def _become(self, *, client_mode: bool) -> bool:
        try:
            await self._node.become(client_mode=client_mode)
        except (SwarmError, OSError) as error:
            logger.debug("the node of the DHT stays what it is: %s", error)
            return False
        return True
