"""A guarded server with every service of a peer, and callers of all its calls. The services do nothing."""

import asyncio
import importlib
import pkgutil
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from swarm.credentials.identity import Identity
from swarm.credentials.rights import CALLS
from swarm.machine.clock import SystemClock
from swarm.rpc import tls, v1
from swarm.rpc.callers import Callers
from swarm.rpc.v1 import averaging_pb2, directory_pb2
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceServicer
from swarm.rpc.v1.directory_pb2_grpc import DirectoryServiceServicer
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


def methods() -> dict[str, Any]:
    """The descriptor of every method of every service that is described in proto/."""
    pages = [importlib.import_module(f"swarm.rpc.v1.{page.name}") for page in pkgutil.iter_modules(v1.__path__)]
    files = [page.DESCRIPTOR for page in pages if page.__name__.endswith("_pb2")]
    services = [service for file in files for service in file.services_by_name.values()]
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


def handlers() -> list[Any]:
    """A handler for each call of each service, which answers SERVED."""

    async def single(_: Any, context: Any) -> None:
        await context.abort(SERVED)

    async def pieces(_: Any, context: Any) -> AsyncIterator[bytes]:
        await context.abort(SERVED)
        yield b""

    found: dict[str, dict[str, Any]] = {}
    for name, method in methods().items():
        _, service, call = name.split("/")
        kinds = ["stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)]
        make = getattr(grpc, f"{'_'.join(kinds)}_rpc_method_handler")
        # Services have coroutines and generators for calls that stream.
        serve: Any = pieces if kinds == ["unary", "stream"] else single
        found.setdefault(service, {})[call] = make(serve, method.input_type._concrete_class.FromString)
    return [grpc.method_handlers_generic_handler(service, calls) for service, calls in found.items()]


def calls_of(channel: Any, identity: Identity) -> dict[str, Any]:
    """Every call of every service, made under the caller's own id."""
    health: Any = HealthStub(channel)
    calls: dict[str, Any] = {
        "/grpc.health.v1.Health/Check": lambda: health.Check(HealthCheckRequest(service="none"), timeout=10.0)
    }
    for name, method in methods().items():
        *around, field = CALLS[name].sender.split(".")
        request = claim = method.input_type._concrete_class()
        for part in around:
            claim = getattr(claim, part)
        if field:
            setattr(claim, field, identity.peer_id)
        kinds = ["stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)]
        call = getattr(channel, "_".join(kinds))(name)
        sent = request.SerializeToString()
        # A caller that is still writing when its call ends may get an error of gRPC itself; streams without a claim
        # write nothing.
        streamed = [sent, averaging_pb2.ExchangeRequest(data=b"x").SerializeToString()] if field else None
        calls[name] = partial(call, streamed and iter(streamed) if method.client_streaming else sent, timeout=10.0)
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
