"""A guarded server with every service of a peer, and callers of all its calls. The services do nothing."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from swarm.credentials.identity import Identity
from swarm.machine.clock import SystemClock
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.v1 import averaging_pb2, content_pb2, directory_pb2, generation_pb2, lease_pb2, meeting_pb2, stage_pb2
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceServicer, AveragingServiceStub
from swarm.rpc.v1.content_pb2_grpc import ContentServiceStub
from swarm.rpc.v1.directory_pb2_grpc import DirectoryServiceServicer, DirectoryServiceStub
from swarm.rpc.v1.generation_pb2_grpc import GenerationServiceServicer, GenerationServiceStub
from swarm.rpc.v1.lease_pb2_grpc import LeaseServiceStub
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceServicer, MeetingServiceStub
from swarm.rpc.v1.probe_pb2_grpc import ProbeServiceServicer, ProbeServiceStub
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer, StageServiceStub
from swarm.types import PeerRecord
from tests.support import locked

DENIED, UNREACHABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE
SERVED = grpc.StatusCode.UNIMPLEMENTED
"""The status with which the services below answer each call that reaches them."""


class Clock(SystemClock):
    """The machine's clock, some time ahead."""

    later_seconds = 0.0
    num_waits = 0

    async def sleep(self, seconds: float) -> None:
        self.num_waits += 1
        await super().sleep(seconds)

    def time(self) -> float:
        return super().time() + self.later_seconds


@dataclass
class Server:
    """A server with every service of a peer. The services do nothing."""

    record: PeerRecord
    callers: Callers
    clock: Clock
    averaging: "Averaging"
    directory: "Directory"
    stage: int = 0

    @asynccontextmanager
    async def called_by(self, identity: Identity) -> AsyncIterator[grpc.aio.Channel]:
        """Open a connection of a caller that trusts this server."""
        credentials = tls.pinned_credentials(self.record.certificate_pem, locked.as_member_of_ours(identity))
        if identity is locked.OPEN:
            credentials = tls.pinned_credentials(self.record.certificate_pem)
        async with grpc.aio.secure_channel(self.record.endpoint, credentials, options=tls.PINNED_OPTIONS) as channel:
            yield channel


class Stage(StageServiceServicer):
    """Has the real service's calls and streams, but waits for nothing."""

    async def Train(self, request_iterator: Any, context: Any) -> AsyncIterator[stage_pb2.TrainReply]:
        await context.abort(SERVED)
        yield stage_pb2.TrainReply()

    async def Evaluate(self, request_iterator: Any, context: Any) -> AsyncIterator[stage_pb2.EvaluateReply]:
        await context.abort(SERVED)
        yield stage_pb2.EvaluateReply()

    async def Hold(self, request: Any, context: Any) -> AsyncIterator[stage_pb2.HoldReply]:
        await context.abort(SERVED)
        yield stage_pb2.HoldReply()


class Generation(GenerationServiceServicer):
    """Has the real service's calls, but waits for nothing."""

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateReply]:
        await context.abort(SERVED)
        yield generation_pb2.GenerateReply()


class Meeting(MeetingServiceServicer):
    """Has the real service's calls, but waits for nothing."""

    async def Check(self, request: Any, context: Any) -> meeting_pb2.CheckReply:
        return meeting_pb2.CheckReply()

    async def Wait(self, _: Any, context: Any) -> None:  # type: ignore[override]
        await context.abort(SERVED)

    Connect = Take = Meet = Wait  # type: ignore[assignment]


class Probe(ProbeServiceServicer):
    """Answers nothing."""

    async def Probe(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        await context.abort(SERVED)


class Directory(DirectoryServiceServicer):
    """Answers with many bytes about every key but the empty one."""

    num_answered = 0

    async def Read(self, request: Any, context: Any) -> directory_pb2.ReadReply:
        self.num_answered += 1
        num_bytes = 1 << 20 if request.key else 1
        return directory_pb2.ReadReply(records=[directory_pb2.SealedRecord(value=bytes(num_bytes))])


class Averaging(AveragingServiceServicer):
    """Reads what comes, as the real service does, and answers with many bytes."""

    num_answering = 0

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[averaging_pb2.ExchangeReply]:
        num_messages = 0
        async for _ in request_iterator:
            num_messages += 1
        yield averaging_pb2.ExchangeReply(data=bytes([num_messages]))

    async def Shared(self, request: Any, context: Any) -> AsyncIterator[averaging_pb2.SharedReply]:
        self.num_answering += 1
        try:
            for _ in range(100):
                yield averaging_pb2.SharedReply(data=bytes(1 << 20))
        finally:
            self.num_answering -= 1


async def code_of(call: Any) -> grpc.StatusCode:
    """The status with which a call ended."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def calls_of(channel: Any, identity: Identity) -> dict[str, Any]:
    """Every call of every service, made under the caller's own id."""
    stage: Any = StageServiceStub(channel)
    lease: Any = LeaseServiceStub(channel)
    directory: Any = DirectoryServiceStub(channel)
    averaging: Any = AveragingServiceStub(channel)
    content: Any = ContentServiceStub(channel)
    generation: Any = GenerationServiceStub(channel)
    probe: Any = ProbeServiceStub(channel)
    meeting: Any = MeetingServiceStub(channel)
    health: Any = HealthStub(channel)
    pb, own = averaging_pb2, identity.peer_id
    seconds = {"timeout": 10.0}
    # A caller that is still writing when its call ends may get an error of gRPC itself; calls without a claim write
    # nothing.
    calls: dict[str, Any] = {
        "/swarm.rpc.v1.StageService/Train": lambda: stage.Train(**seconds),
        "/swarm.rpc.v1.StageService/Evaluate": lambda: stage.Evaluate(**seconds),
        "/swarm.rpc.v1.StageService/Hold": lambda: stage.Hold(stage_pb2.HoldRequest(), **seconds),
        "/swarm.rpc.v1.StageService/Describe": lambda: stage.Describe(
            stage_pb2.DescribeRequest(caller=stage_pb2.Incarnation(peer_id=own)), **seconds
        ),
        "/swarm.rpc.v1.DirectoryService/Read": lambda: directory.Read(directory_pb2.ReadRequest(), **seconds),
        "/swarm.rpc.v1.LeaseService/Acquire": lambda: lease.Acquire(
            lease_pb2.AcquireRequest(trainer_id=own), **seconds
        ),
        "/swarm.rpc.v1.AveragingService/Report": lambda: averaging.Report(
            pb.ReportRequest(sender=pb.Contact(peer_id=own)), **seconds
        ),
        "/swarm.rpc.v1.AveragingService/Exchange": lambda: averaging.Exchange(
            iter([pb.ExchangeRequest(open=pb.ExchangeOpen(peer_id=own)), pb.ExchangeRequest(data=b"x")]), **seconds
        ),
        "/swarm.rpc.v1.ProbeService/Probe": lambda: probe.Probe(**seconds),
        "/swarm.rpc.v1.MeetingService/Check": lambda: meeting.Check(meeting_pb2.CheckRequest(peer_id=own), **seconds),
        "/swarm.rpc.v1.MeetingService/Wait": lambda: meeting.Wait(**seconds),
        "/swarm.rpc.v1.MeetingService/Connect": lambda: meeting.Connect(**seconds),
        "/swarm.rpc.v1.MeetingService/Take": lambda: meeting.Take(**seconds),
        "/swarm.rpc.v1.MeetingService/Meet": lambda: meeting.Meet(meeting_pb2.MeetRequest(), **seconds),
        "/swarm.rpc.v1.GenerationService/Generate": lambda: generation.Generate(**seconds),
        "/swarm.rpc.v1.ContentService/Weights": lambda: content.Weights(
            content_pb2.ContentRequest(peer_id=own), **seconds
        ),
        "/swarm.rpc.v1.ContentService/Tokenizer": lambda: content.Tokenizer(
            content_pb2.ContentRequest(peer_id=own), **seconds
        ),
        "/grpc.health.v1.Health/Check": lambda: health.Check(health_pb2.HealthCheckRequest(service="none"), **seconds),
    }
    for name in ("Begin", "Average", "Commit", "Abort", "Barrier", "Shared", "Download"):
        request = getattr(pb, f"{name}Request")(peer_id=own)
        calls[f"/swarm.rpc.v1.AveragingService/{name}"] = lambda name=name, request=request: getattr(averaging, name)(
            request, **seconds
        )
    return calls


def is_served(code: grpc.StatusCode) -> bool:
    return code in (SERVED, grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND)


READ = b"/swarm.rpc.v1.DirectoryService/Read"
LARGE, SMALL = directory_pb2.ReadRequest(key="x"), directory_pb2.ReadRequest()
"""Sizes of the answers that are wanted."""


@asynccontextmanager
async def asking_without_taking(
    server: Server, method: bytes, request: Message, *, times: int = 1, shown: Path | None = None
) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for something over a connection, and take no byte of the answer, which gRPC's clients would take.

    It is HTTP/2 with an initial window of 0.

    Args:
        shown: a file with the certificate that the client shows, and its key; without it, none is shown.
    """
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.set_alpn_protocols(["h2"])
    if shown is not None:
        trusting.load_cert_chain(shown)
    host, port = server.record.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
    window = struct.pack(">HI", 4, 0)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, window))
    headers = {
        b":method": b"POST", b":scheme": b"https", b":path": method,
        b":authority": b"x", b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    # Each header is a literal without indexing.
    packed = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in headers.items())
    message = request.SerializeToString()
    for stream_id in range(1, 2 * times, 2):
        writer.write(_frame(1, 4, stream_id, packed))
        writer.write(_frame(0, 1, stream_id, struct.pack(">xI", len(message)) + message))
    await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload
