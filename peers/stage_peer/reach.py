"""How others reach this peer: it has them dial back, and waits at meeting points where they get no answer.

Run by swarm-peer from before it announces anything until it ends. What others say decides what is announced: direct
endpoints that one of them reached, and tunnels if one of them did not. A peer without either is not announced, and its
user is told why. Nothing here serves, and what meeting points do is in swarm/rpc/meeting.
"""

import asyncio
import errno
import logging
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Never, Self

import grpc

from peers.shared.membership import Membership
from peers.stage_peer.listen import Announced, Listen
from swarm.dht import addresses
from swarm.dht.addresses import is_host
from swarm.dht.node import DhtNode
from swarm.errors import SwarmError
from swarm.rpc import tls
from swarm.rpc.channels import SERVER_OPTIONS, bind_server
from swarm.rpc.entry import Entry, endpoint_of
from swarm.rpc.meeting.carrying import Kind
from swarm.rpc.meeting.check import ANSWER_SECONDS, DIAL_SECONDS, MAX_ENDPOINTS, check
from swarm.rpc.meeting.dialler import Dialler
from swarm.rpc.meeting.endpoints import direct
from swarm.rpc.meeting.points import Points
from swarm.rpc.meeting.waiting import Waiting
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

NUM_ASKED = 3
"""Peers that dial back."""
LOOK_SECONDS = 5.0
"""Between two looks for somebody to ask, while nobody has answered."""
AGAIN_SECONDS, DOUBT_SECONDS = 300.0, 15.0
"""Between two questions; and sooner where an answer differs from the one before, which may have been an accident."""
SAY_SECONDS = 15.0
"""A peer that nobody can reach says so at this interval."""
_EVERYWHERE = ("", "0.0.0.0", "::")
"""Hosts to listen on that are all addresses of a machine."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What those that dialled back reached.

    Attributes:
        endpoints: direct ones, the best first.
        dht_endpoints: of the DHT's node.
        num_asked: how many dialled back.
        num_reached: how many of them reached an endpoint.
    """

    endpoints: tuple[str, ...]
    dht_endpoints: tuple[str, ...]
    num_asked: int
    num_reached: int

    @classmethod
    def of(cls, named: pb.CheckRequest, replies: Sequence[pb.CheckReply]) -> Self:
        """Sum up the answers: of what was named one yes counts, and of addresses that a peer was seen at most of them.

        Nothing else that is answered counts.
        """
        return cls(
            endpoints=_reached(named.endpoints, [(reply.observed_host, reply.endpoints) for reply in replies]),
            dht_endpoints=_reached(
                named.dht_endpoints, [(reply.observed_host, reply.dht_endpoints) for reply in replies]
            ),
            num_asked=len(replies),
            num_reached=sum(bool(reply.endpoints) for reply in replies),
        )


def _reached(named: Sequence[str], told: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    own = [end for end in named if not end.startswith(":") and any(end in reached for _, reached in told)]
    seen = Counter(
        endpoint
        for host, reached in told
        for port in (int(end[1:]) for end in named if end.startswith(":"))
        if (endpoint := endpoint_of(host, port)) in reached
    )
    return tuple(dict.fromkeys([*own, *(end for end, count in seen.items() if 2 * count > len(told))]))


class Reach:
    """One peer's."""

    def __init__(
        self, membership: Membership, node: DhtNode, listen: Listen, *, insecure: bool
    ) -> None:  # fmt: skip
        """
        Args:
            listen: where its server is to listen, and where others may reach that. If any port will do, a free one is
                taken and kept for this process.
        """
        self._membership = membership
        self._node = node
        self._insecure = insecure
        self.host = listen.host
        self._reserved = None if listen.port else _reserved(listen.host)
        self.port: int = listen.port if self._reserved is None else self._reserved.getsockname()[1]
        self._candidates = listen.endpoints(self.port)[: MAX_ENDPOINTS - 1]
        self._direct: tuple[str, ...] | None = None
        """None while it is not known which endpoints others reach."""
        self._dht_addresses = listen.dht_addresses
        self._dht_ports = dict.fromkeys(str(_host_and_port(address)[1]) for address in listen.dht_addresses)
        self._is_hidden = False
        self._serves = False
        self._rng = random.Random(membership.peer_id)
        self._dialler = Dialler()
        self._waiting = Waiting(
            membership.identity, Points(membership.identity, insecure=insecure), self._dialler, membership.clock,
            server=(listen.host if listen.host not in _EVERYWHERE else "127.0.0.1", self.port),
            candidates=self._points,
        )  # fmt: skip

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All ways to this peer that are known to work, the best first."""
        return (*(self._direct or ()), *(self._waiting.endpoints if self._is_hidden else ()))[:8]

    def announced(self, own_port: int) -> Announced:
        """What is told now, of the server, which listens on `own_port`."""
        self._serves = True
        return Announced(
            endpoints=self.endpoints or ("",),
            dht_addresses=self._dht_addresses,
            num_punched=self._waiting.num_lines(Kind.PUNCHED),
            num_relayed=self._waiting.num_lines(Kind.RELAYED),
        )

    async def found_out(self) -> None:
        """Return once there is a way to this peer; says again and again that there is none."""
        clock = self._membership.clock
        said_at = clock.monotonic()
        while not self.endpoints:
            if self._direct is not None and clock.monotonic() >= said_at + SAY_SECONDS:
                said_at = clock.monotonic()
                logger.error(
                    "nobody can reach this peer, so it does not serve yet: no peer of the run takes it in, and %s",
                    self._what_to_do(),
                )
            await clock.sleep(0.05)

    async def keep(self) -> Never:
        """Find out, and keep what was found out true, until cancelled. Raises ValueError if the port is in use."""
        waiting: asyncio.Task[Never] | None = None
        former: Verdict | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    verdict, seconds = await self._verdict(), LOOK_SECONDS
                    if verdict is None:
                        self._direct = self._candidates if self._direct is None else self._direct
                    else:
                        is_sure = former is None or verdict.endpoints == former.endpoints
                        former, seconds = verdict, AGAIN_SECONDS if is_sure else DOUBT_SECONDS
                        if is_sure:
                            self._conclude(verdict)
                            if self._is_hidden and waiting is None:
                                waiting = tasks.create_task(self._waiting.run())
                            await self._conclude_dht(verdict)
                    await self._membership.clock.sleep(seconds)
        finally:
            await self._dialler.close()
            if self._reserved is not None:
                self._reserved.close()

    def _conclude(self, verdict: Verdict) -> None:
        is_same = self._direct == verdict.endpoints
        self._direct = verdict.endpoints
        self._is_hidden = verdict.num_reached < verdict.num_asked
        if is_same:
            return
        if verdict.endpoints:
            logger.info(
                "others reach this peer at %s: %d of %d that dialled back", verdict.endpoints[0], verdict.num_reached,
                verdict.num_asked,
            )  # fmt: skip
        else:
            logger.warning("others reach this peer by way of further peers alone, since %s", self._what_to_do())

    async def _conclude_dht(self, verdict: Verdict) -> None:
        if not self._dht_addresses:
            return
        if not verdict.dht_endpoints:
            logger.info("others do not reach its port of the DHT: from now on it asks there, and is not asked")
            self._dht_addresses = ()
            try:
                await self._node.become_client()
            except (SwarmError, OSError) as error:
                logger.debug("it stays a node that others would ask: %s", error)
            return
        _, libp2p_id = addresses.split(self._dht_addresses[0])
        ends = (end.rpartition(":") for end in verdict.dht_endpoints)
        self._dht_addresses = tuple(
            f"{addresses.at(host.strip('[]'), int(port))}/p2p/{libp2p_id}" for host, _, port in ends
        )

    def _what_to_do(self) -> str:
        hosts = dict.fromkeys(end.rpartition(":")[0] for end in self._candidates)
        return (
            f"those that dialled back got no answer at {', '.join(hosts)}, TCP ports {self.port} (gRPC) and "
            f"{', '.join(self._dht_ports) or '--dht-port'} (DHT). To be reached directly, open both in the firewall or "
            "forward them in the router; --port and --dht-port fix them, and --announce names the address outside"
        )

    # -- asking ------------------------------------------------------------------------------------------------------

    async def _verdict(self) -> Verdict | None:
        """What some peers say; None if none of them does. Raises ValueError if the port is in use."""
        others = [record for record in self._membership.known.everyone() if direct(record.endpoints)]
        if not others:
            return None
        request = pb.CheckRequest(peer_id=self._membership.peer_id, endpoints=[*self._candidates, f":{self.port}"])
        nodes = [_host_and_port(address) for address in self._dht_addresses][: MAX_ENDPOINTS - 1]
        request.dht_endpoints.extend([endpoint_of(*node) for node in nodes] + [f":{port}" for _, port in nodes[:1]])
        asked = self._rng.sample(others, min(NUM_ASKED, len(others)))
        async with self._answering():
            replies = await self._replies(asked, request)
        told = [reply for reply in replies if is_host(reply.observed_host)]
        return Verdict.of(request, told) if told else None

    async def _replies(self, asked: Sequence[PeerRecord], request: pb.CheckRequest) -> list[pb.CheckReply]:
        """What those say that answer; once one does, the others have as long as it takes to dial."""
        told = list[pb.CheckReply]()
        left = {asyncio.ensure_future(self._ask(record, request)) for record in asked}
        try:
            while left:
                patience = DIAL_SECONDS + 0.5 if told else None
                done, left = await asyncio.wait(left, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                told += [reply for task in done if (reply := task.result()) is not None]
        finally:
            for task in left:
                task.cancel()
        return told

    async def _ask(self, record: PeerRecord, request: pb.CheckRequest) -> pb.CheckReply | None:
        try:
            return await check(self._membership.channels.channel(record), request, seconds=ANSWER_SECONDS)
        except SwarmError as error:
            logger.debug("%s does not dial back: %s", record.peer_id, error)
            return None

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Have somebody answer at this peer's port, with its certificate, while its server is not there yet."""
        if self._serves:
            yield
            return
        server = grpc.aio.server(options=SERVER_OPTIONS)
        credentials = None if self._insecure else tls.server_credentials(self._membership.identity)
        bind_server(server, self.host, self.port, credentials)
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)
            # gRPC closes its socket a moment later, and the next server needs the port.
            while _is_listened_on(self.host, self.port):
                await self._membership.clock.sleep(0.01)

    def _points(self) -> Sequence[Entry]:
        """Peers that may be meeting points, with all of their endpoints, in an order of this peer's own."""
        own_id = self._membership.peer_id
        others = sorted(
            self._membership.known.everyone(), key=lambda record: sha256(f"{own_id} {record.peer_id}".encode()).digest()
        )
        return [Entry(PeerId(record.peer_id), end) for record in others for end in direct(record.endpoints)]


def _host_and_port(address: str) -> tuple[str, int]:
    """Of a multiaddress of the DHT."""
    _, _, host, _, port, *_ = address.split("/")
    return host, int(port)


def _reserved(host: str) -> socket.socket:
    """A free port, kept from others while no server has it. Raises ValueError if the host is none of this machine's."""
    try:
        return _bound(host, 0)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}: {error.strerror}; choose another --host") from None


def _is_listened_on(host: str, port: int) -> bool:
    try:
        with _bound(host, port) as sock:
            sock.listen()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _bound(host: str, port: int) -> socket.socket:
    """A socket that does not listen, so that a server can take the port nevertheless. Raises OSError."""
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
