"""Finds out whether others reach a peer: the caller's side and the servicer's side.

A peer that joins asks two or three others, which dial it back and answer which endpoints they reached.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from swarm.errors import MalformedMessage
from swarm.machine.clock import Clock
from swarm.rpc.ask import ask
from swarm.rpc.callers import Quota, caller_of, is_tunnelled, peer_of, token_or_address_of
from swarm.rpc.endpoint import endpoint_of, host_and_port, may_be_dialled, own_versions, plain_ip_of
from swarm.rpc.entry import id_of, shown_certificate
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceStub

logger = logging.getLogger(__name__)

DIAL_SECONDS = 2.0
"""Longest wait for an endpoint to answer: enough for a lost packet and three round trips."""
ANSWER_SECONDS = 5.0
"""Deadline of a question: other callers' may be answered before it."""
AT_ONCE = 8
"""The most callers that are dialled back at the same time; one that is not reached takes DIAL_SECONDS."""
GAP_SECONDS = 1.0
"""A caller's next question is answered no sooner than this after its last one."""
MOST_ASKING = 64
"""The most questions that wait or are answered."""
MAX_ENDPOINTS = 4
"""The most endpoints of each kind in one question."""
MOST_NAMES = 4
"""The most names that are looked up at the same time."""
MULTISTREAM = b"\x13/multistream/1.0.0\n"
"""The bytes with which both sides of a libp2p connection begin (github.com/multiformats/multistream-select)."""


async def check(channel: grpc.aio.Channel, request: pb.CheckRequest, *, seconds: float) -> pb.CheckReply:
    """Have a peer dial this one back. Raises SwarmError as `ask` does."""
    stub: Any = MeetingServiceStub(channel)
    reply: pb.CheckReply = await ask(stub.Check, request, seconds=seconds)
    return reply


@dataclass(frozen=True)
class _Target:
    endpoint: str
    port: int
    address: str | None
    """The address of its host to dial; None if none may be dialled."""
    is_observed: bool
    """Whether the call came from the address to dial, or from this machine."""
    has_way: bool
    """Whether this machine has any address of the same version of IP."""

    @property
    def is_strange(self) -> bool:
        return self.address is not None and not self.is_observed


@dataclass(eq=False)
class DialBack:
    """Dials callers back and answers them, AT_ONCE at a time. It must not serve as a port scanner.

    About an address other than the caller's own, it answers only whether the asking peer itself is there, which TLS
    proves, or that this machine has no way there. A "no" always takes the same time. A node of the DHT is dialled only
    where its peer has proved itself, or at the caller's own address.
    """

    clock: Clock
    insecure: bool
    """Whether the run does without TLS; then anything that accepts a connection passes for the caller."""
    _dialling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE), init=False)
    _asking: Quota = field(default_factory=lambda: Quota("questions", MOST_ASKING, each=AT_ONCE // 2), init=False)
    """The callers in it are bearers of tokens, or addresses: of AT_ONCE one of these has half."""
    _resolving: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MOST_NAMES, "names"), init=False)
    """Names that take long hold up other callers' names, and nothing else of this process."""
    _asked: Quota = field(init=False)
    """The members or addresses that were answered a moment ago."""

    def __post_init__(self) -> None:
        self._asked = Quota(
            "questions so soon", each=GAP_SECONDS, retry_seconds=GAP_SECONDS, per_second=1.0, clock=self.clock
        )

    async def answer(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        """Dial the caller's endpoints. Raises Overloaded if the caller has just asked, or too many questions are under
        way, in all or for its bearer. Raises MalformedMessage if there are too many endpoints, or one has no port."""
        caller, observed = caller_of(context), peer_address(context)[0]
        if is_tunnelled(observed):
            return pb.CheckReply()
        self._asked.take(caller, GAP_SECONDS)
        asked = (request.endpoints, request.dht_endpoints)
        if (most := max(map(len, asked))) > MAX_ENDPOINTS:
            raise MalformedMessage(f"{most} endpoints to dial, at most {MAX_ENDPOINTS} are")
        named = [[_named(endpoint) for endpoint in ends] for ends in asked]
        with self._asking.taken(token_or_address_of(context)):
            async with self._dialling:
                grpc_targets, dht_targets = [
                    await asyncio.gather(*(self._target(*end, observed) for end in ends)) for ends in named
                ]
                began_at = self.clock.monotonic()
                near = [target for target in dht_targets if target.is_observed]
                proved, nodes = await asyncio.gather(
                    _reached(grpc_targets, lambda host, port: self._is_peer(host, port, request.peer_id)),
                    _reached(near, is_node),
                )
                hosts = {target.address for target in proved}
                far = [target for target in dht_targets if target not in near and target.address in hosts]
                nodes += await _reached(far, is_node)
        if any(target.is_strange for target in set(grpc_targets) - set(proved)):
            # The caller must not learn how soon a port of another machine refuses.
            await self.clock.sleep(max(0.0, began_at + DIAL_SECONDS - self.clock.monotonic()))
        return pb.CheckReply(
            observed_host=observed,
            endpoints=[target.endpoint for target in proved],
            dht_endpoints=[target.endpoint for target in nodes],
            untried=[target.endpoint for target in (*grpc_targets, *dht_targets) if not target.has_way],
        )

    async def _target(self, host: str, port: int, observed: str) -> _Target:
        host = host or observed
        address = next((each for each in await self._addresses(host) if may_be_dialled(each, observed)), None)
        is_observed = address == observed or ipaddress.ip_address(observed).is_loopback
        return _Target(endpoint_of(host, port), port, address, is_observed, address is None or _has_way(address))

    async def _addresses(self, host: str) -> list[str]:
        if (ip := plain_ip_of(host)) is not None:
            return [str(ip)]
        look_up = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                found = await asyncio.get_running_loop().run_in_executor(self._resolving, look_up)
        except (OSError, UnicodeError, TimeoutError):
            return []
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def _is_peer(self, host: str, port: int, peer_id: str) -> bool:
        if not self.insecure:
            return id_of(await shown_certificate(host, port)) == peer_id
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True


async def _reached(targets: Iterable[_Target], answers: Any) -> list[_Target]:
    """The targets for which `answers(host, port)` is true, in their order."""

    async def is_reached(target: _Target) -> bool:
        if target.address is None:
            return False
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                return bool(await answers(target.address, target.port))
        except (OSError, TimeoutError) as error:
            logger.debug("%s port %d does not answer: %r", target.address, target.port, error)
            return False

    targets = list(targets)
    found = await asyncio.gather(*map(is_reached, targets))
    return [target for target, is_there in zip(targets, found, strict=True) if is_there]


async def is_node(host: str, port: int) -> bool:
    """Whether a node of libp2p answers at this address."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(MULTISTREAM)
        return await reader.readexactly(len(MULTISTREAM)) == MULTISTREAM
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.close()


def _named(endpoint: str) -> tuple[str, int]:
    try:
        host, port = host_and_port(endpoint)
    except ValueError as error:
        raise MalformedMessage(str(error)) from None
    if len(host) > 255:
        raise MalformedMessage(f"{endpoint[:80]!r} has no host's name")
    return host, port


def _has_way(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ip.is_loopback or ip.version in own_versions()


def peer_address(context: Any) -> tuple[str, int]:
    host, port = host_and_port(peer_of(context).partition(":")[2])
    return str(plain_ip_of(host) or host), port
