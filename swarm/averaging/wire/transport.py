"""How averaging reaches other peers, over gRPC. Requests and replies are the protocol's messages. Never retries."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from swarm.averaging.agreement.messages import unpack_deviations, unpack_failure
from swarm.averaging.agreement.timing import Timing
from swarm.compression.buffers import Received
from swarm.compression.codec import Buffer
from swarm.credentials.certificates import peer_id_of
from swarm.errors import DeadlineExceeded, IntegrityError, MalformedMessage, PeerUnavailable, SwarmError
from swarm.honesty.comparison import Deviation
from swarm.machine.clock import Clock
from swarm.rpc.ask import ask, download
from swarm.rpc.bounds import CHUNK_BYTES
from swarm.rpc.channels import ChannelPool
from swarm.rpc.failures import translate
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceStub
from swarm.types import PROTOCOLS, Block, PeerId, PeerRecord, PeerState

Members = Mapping[PeerId, PeerRecord]
Request = TypeVar("Request")
Reply = TypeVar("Reply")


TELLING_BYTES = 4 << 20
"""The least size of an upload from which a line's rate is measured. A smaller one fits in buffers."""


@dataclass(frozen=True)
class Method(Generic[Request, Reply]):
    """A unary call of AveragingService, with its message types."""

    name: str


REPORT = Method[pb.ReportRequest, pb.ReportReply]("Report")
BEGIN = Method[pb.BeginRequest, pb.BeginReply]("Begin")
AVERAGE = Method[pb.AverageRequest, pb.AverageReply]("Average")
COMMIT = Method[pb.CommitRequest, pb.CommitReply]("Commit")
ABORT = Method[pb.AbortRequest, pb.AbortReply]("Abort")
BARRIER = Method[pb.BarrierRequest, pb.BarrierReply]("Barrier")


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The answer that a member gets from another one.

    Attributes:
        encoded: the sum over a part, or a whole contribution.
        squared_norm: the squared norm of the decoded vector, as computed by the sender.
        upload_seconds: how long it took to send our own part to that member; 0 if nothing was sent.
        deviations: the members whose contributions are out of line, as the sender says.
    """

    encoded: Buffer
    squared_norm: float
    upload_seconds: float = 0.0
    deviations: Sequence[Deviation] = ()


class Caller(Protocol):
    """Calls a peer, or this peer itself without a network."""

    async def __call__(
        self, peer: PeerRecord, method: Method[Request, Reply], request: Request, *, timeout_seconds: float
    ) -> Reply: ...


class OwnBlock(Protocol):
    """Another block that this very process serves: its answers to calls, without a network."""

    async def handle(self, method: Method[Request, Reply], request: Request) -> Reply: ...

    async def shared(self, request: pb.SharedRequest) -> Buffer: ...


class Transport:
    """Calls to other peers over gRPC. Every call raises PeerUnavailable, DeadlineExceeded, or the error that the peer
    answered with.

    Tensors have a connection of their own, so that reports never wait behind them.
    """

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def call(
        self, peer: PeerRecord, method: Method[Request, Reply], request: Request, *, timeout_seconds: float
    ) -> Reply:
        """Make one call: one request, one answer."""
        call: Any = getattr(self._stub(peer, bulk=False), method.name)
        # Not required to be finite: a contribution's norm may be infinite, and the leader has to know it.
        reply: Reply = await ask(call, request, seconds=timeout_seconds, finite=False)
        return reply

    async def exchange(
        self, peer: PeerRecord, opening: pb.ExchangeOpen, part: Buffer, *, reply_bytes: int, timeout_seconds: float,
        silence_seconds: float | None = None,
    ) -> Payload:  # fmt: skip
        """Send a part to its owner and return the owner's average. Raises MemberFailed if the owner blames a member.
        `silence_seconds` is the longest wait for the next piece; None if only `timeout_seconds` limits it."""
        upload_seconds = 0.0

        async def requests() -> AsyncIterator[pb.ExchangeRequest]:
            nonlocal upload_seconds
            yield pb.ExchangeRequest(open=opening)
            started_at = time.perf_counter()
            for piece in pieces_of(part):
                yield pb.ExchangeRequest(data=piece)
            # This line runs once the last piece is on its way. A small part fits in buffers, so its time says nothing
            # about the line.
            if len(part) >= TELLING_BYTES:
                upload_seconds = time.perf_counter() - started_at

        squared_norm: float | None = None
        deviations: Sequence[Deviation] = ()
        encoded = Received(reply_bytes)
        stub: Any = self._stub(peer, bulk=True)
        call = stub.Exchange(requests(), timeout=timeout_seconds)
        try:
            replies = aiter(call)
            while True:
                async with asyncio.timeout(silence_seconds):
                    reply = await anext(replies, None)
                if reply is None:
                    break
                match reply.WhichOneof("message"):
                    case "failure":
                        raise unpack_failure(reply.failure)
                    case "reduced":
                        squared_norm = reply.reduced.squared_norm
                        deviations = unpack_deviations(reply.reduced.deviations)
                    case _:
                        encoded.add(reply.data)
        except TimeoutError:
            raise DeadlineExceeded(f"nothing came from {peer.peer_id} for {silence_seconds} s") from None
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None
        finally:
            call.cancel()
        if squared_norm is None:
            raise MalformedMessage("an averaged part comes without its norm")
        return Payload(
            encoded=encoded.whole(), squared_norm=squared_norm, upload_seconds=upload_seconds, deviations=deviations
        )

    async def shared(
        self, peer: PeerRecord, request: pb.SharedRequest, *, reply_bytes: int, timeout_seconds: float
    ) -> Buffer:
        """Fetch a stage's average of the parameters that it and this one hold, `reply_bytes` long."""
        encoded = Received(reply_bytes)
        stub: Any = self._stub(peer, bulk=True)
        # The call's own deadline is for all pieces together.
        call = stub.Shared(request, timeout=timeout_seconds)
        async with aclosing(download(call, peer.peer_id, silence_seconds=timeout_seconds)) as replies:
            async for reply in replies:
                encoded.add(reply.data)
        return encoded.whole()

    def download(
        self, peer: PeerRecord, request: pb.DownloadRequest, *, silence_seconds: float
    ) -> AsyncIterator[pb.DownloadReply]:
        """The pieces of a snapshot; `silence_seconds` is the longest wait for the next."""
        call: Any = self._stub(peer, bulk=True).Download(request)
        return download(call, peer.peer_id, silence_seconds=silence_seconds)

    async def ping(self, peer: PeerRecord, *, timeout_seconds: float) -> None:
        health: Any = HealthStub(self._channels.channel(peer))
        await ask(health.Check, HealthCheckRequest(), seconds=timeout_seconds)

    def is_connected(self, peer: PeerRecord) -> bool:
        """Whether there is a connection to a peer. The connection breaks at once when the peer's process dies."""
        return self._channels.is_connected(peer)

    def _stub(self, peer: PeerRecord, *, bulk: bool) -> AveragingServiceStub:
        return AveragingServiceStub(self._channels.channel(peer, bulk=bulk))


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """How a leader reaches its members. `is_silent` tells whether a peer has been silent for so long that it must be
    frozen or gone. A peer that is merely busy goes on reporting."""

    call: Caller
    is_silent: Callable[[PeerId], bool]
    timing: Timing

    async def __call__(
        self, members: Members, method: Method[Request, Reply], requests: Mapping[PeerId, Request],
        timeout_seconds: float, *, until: Callable[[Reply | SwarmError], bool] = lambda reply: True,
    ) -> dict[PeerId, Reply | SwarmError]:  # fmt: skip
        """Call all members at once. Returns the answers and errors that came in time. `until` tells whether an answer
        is acceptable. After one that is not, the other members get only a moment more."""

        async def one(peer: PeerId) -> Reply | SwarmError:
            try:
                return await self.call(members[peer], method, requests[peer], timeout_seconds=timeout_seconds)
            except SwarmError as error:
                return error

        replies: dict[PeerId, Reply | SwarmError] = {}
        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(one(peer)): peer for peer in members}
            time = asyncio.get_running_loop().time
            pending, listens_since, gives_up_at = set(tasks), time(), math.inf
            while pending and time() < gives_up_at:
                waits_since, seconds = time(), min(self.timing.heartbeat_seconds, gives_up_at - time())
                done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                # In the order of the members, because the order of a set of tasks changes from run to run.
                replies |= {peer: task.result() for task, peer in tasks.items() if task in done}
                if time() - waits_since > seconds + self.timing.heartbeat_seconds:
                    # This peer itself was frozen, so the silence of others may only mean that their messages wait here.
                    listens_since = time()
                has_listened = time() - listens_since >= self.timing.fresh_seconds
                silent = [task for task in tasks if task in pending and has_listened and self.is_silent(tasks[task])]
                replies |= {
                    tasks[task]: PeerUnavailable("it has fallen silent", is_unreachable=True) for task in silent
                }
                pending.difference_update(silent)
                if (done or silent) and not all(map(until, replies.values())):
                    gives_up_at = time() + self.timing.grace_seconds
            for task in tasks:
                task.cancel()
        return replies


def pieces_of(data: Buffer) -> Iterator[bytes]:
    view = memoryview(data)
    return (bytes(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES))


def contact_of(peer: PeerRecord) -> pb.Contact:
    endpoints = " ".join(peer.endpoints)
    return pb.Contact(peer_id=peer.peer_id, endpoints=endpoints, certificate_pem=peer.certificate_pem)


def record_of(contact: pb.Contact, block: Block) -> PeerRecord:
    """The record by which the channel pool reaches a contact. Raises MalformedMessage if the contact has no address, or
    the certificate of another peer."""
    try:
        if contact.certificate_pem and peer_id_of(contact.certificate_pem) != contact.peer_id:
            raise MalformedMessage(f"the certificate is not that of {contact.peer_id[:40]!r}")
        endpoint, *others = contact.endpoints.split(" ")
        return PeerRecord(
            peer_id=PeerId(contact.peer_id),
            endpoint=endpoint,
            other_endpoints=tuple(others),
            certificate_pem=contact.certificate_pem,
            stage=block.stage,
            variant=block.variant,
            state=PeerState.SERVING,
            announced_at=0.0,
            # A contact does not say which protocols its peer speaks.
            protocol_version=PROTOCOLS.oldest,
        )
    except (ValueError, IntegrityError):
        raise MalformedMessage(f"not a peer's address: {contact.peer_id[:40]!r} {contact.endpoints[:80]!r}") from None


@dataclass(frozen=True, kw_only=True)
class OtherMembers:
    transport: Transport
    clock: Clock
    timing: Timing
    records: Mapping[str, PeerRecord]
    opening: Callable[[str], pb.ExchangeOpen]
    timeout_seconds: float
    silence_seconds: float
    """How long a member may send nothing, if it need not wait for other members."""

    async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
        peer = self.records[peer_id]
        silence: list[str] = []

        async def watch(scope: asyncio.Timeout) -> None:
            try:
                await self._watch(peer)
            except SwarmError as error:
                silence.append(str(error))
                scope.reschedule(asyncio.get_running_loop().time())

        try:
            # No task group: it would keep an exception that passes through it in a reference cycle, with all frames and
            # their vectors.
            async with asyncio.timeout(None) as scope:
                watching = asyncio.create_task(watch(scope))
                try:
                    return await self.transport.exchange(
                        peer, self.opening(peer_id), part, reply_bytes=reply_bytes,
                        timeout_seconds=self.timeout_seconds, silence_seconds=None if waits else self.silence_seconds,
                    )  # fmt: skip
                finally:
                    watching.cancel()
                    del watching, scope  # They would make a reference cycle too.
        except TimeoutError:
            if not silence:
                raise
            raise PeerUnavailable(silence[0]) from None

    async def _watch(self, peer: PeerRecord) -> None:
        """Ping a member again and again. Raise SwarmError once it does not answer, long before the exchange's
        deadline."""
        while True:
            await self.clock.sleep(self.timing.heartbeat_seconds)
            await self.transport.ping(peer, timeout_seconds=self.timing.report_seconds)
