"""Averaging between peers of one process: direct calls take the place of gRPC, with serialized messages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

from swarm.averaging.servicer import Handlers
from swarm.averaging.wire.transport import Method, Payload, Reply, Request, Transport
from swarm.compression.codec import Buffer
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerRecord


class MemoryNetwork:
    """The network of the peers: a directory of them, and the calls between them.

    Attributes:
        line: exchanges wait while it is not set, as on a slow line. At first it is set.
    """

    def __init__(self) -> None:
        self.line = asyncio.Event()
        self.line.set()
        self._peers: dict[str, tuple[PeerRecord, Handlers]] = {}

    def add(self, record: PeerRecord, handlers: Handlers) -> None:
        self._peers[record.peer_id] = record, handlers

    def remove(self, record: PeerRecord) -> None:
        """Remove a peer as kill -9 does. All calls to it fail, also those that already wait for an answer."""
        del self._peers[record.peer_id]

    def records(self, stage: int) -> list[PeerRecord]:
        return [record for record, _ in self._peers.values() if record.stage == stage]

    def handlers(self, peer: PeerRecord) -> Handlers:
        """The handlers of the called peer. Raises PeerUnavailable if the peer is gone."""
        if peer.peer_id not in self._peers:
            raise PeerUnavailable(f"{peer.peer_id} is gone", is_unreachable=True)
        return self._peers[peer.peer_id][1]


class MemoryTransport(Transport):
    """One peer's calls to the others."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    async def call(
        self, peer: PeerRecord, method: Method[Request, Reply], request: Request, *, timeout_seconds: float
    ) -> Reply:
        reply = self._network.handlers(peer).handle(method, _copy(request))
        return _copy(await self._answer(peer, reply, timeout_seconds))

    async def exchange(
        self, peer: PeerRecord, opening: pb.ExchangeOpen, part: Buffer, *, reply_bytes: int, timeout_seconds: float,
        silence_seconds: float | None = None,
    ) -> Payload:  # fmt: skip
        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(part)

        await self._network.line.wait()
        answer = self._network.handlers(peer).exchange(_copy(opening), pieces())
        payload = await self._answer(peer, answer, timeout_seconds)
        assert len(payload.encoded) == reply_bytes, "an answer has the size that the codec says"
        return Payload(encoded=bytes(payload.encoded), squared_norm=payload.squared_norm)

    async def shared(
        self, peer: PeerRecord, request: pb.SharedRequest, *, reply_bytes: int, timeout_seconds: float
    ) -> Buffer:
        encoded = await self._answer(peer, self._network.handlers(peer).shared(_copy(request)), timeout_seconds)
        assert len(encoded) == reply_bytes, "an answer has the size that the codec says"
        return bytes(encoded)

    async def ping(self, peer: PeerRecord, *, timeout_seconds: float) -> None:
        self._network.handlers(peer)

    def is_connected(self, peer: PeerRecord) -> bool:
        return True

    async def download(
        self, peer: PeerRecord, request: pb.DownloadRequest, *, silence_seconds: float
    ) -> AsyncIterator[pb.DownloadReply]:
        async for reply in self._network.handlers(peer).download(_copy(request)):
            self._network.handlers(peer)
            yield _copy(reply)

    async def _answer(self, peer: PeerRecord, work: Awaitable[Reply], seconds: float) -> Reply:
        try:
            async with asyncio.timeout(seconds):
                reply = await work
        except TimeoutError:
            raise DeadlineExceeded(f"{peer.peer_id} did not answer within {seconds:.1f} s") from None
        self._network.handlers(peer)
        return reply


def _copy(message: Request) -> Request:
    copy: Request = type(message).FromString(message.SerializeToString())  # type: ignore[attr-defined]  # a message
    return copy
