"""Meeting points, and a peer behind one, in this process: real servers on loopback, with TLS and the guard."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from swarm.credentials.authority import Authority
from swarm.credentials.identity import Identity, generate
from swarm.machine.clock import Clock, SystemClock
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.entry import Entry
from swarm.rpc.guard import Guard
from swarm.rpc.meeting.carrying import MeetingLimits
from swarm.rpc.meeting.dialler import Points
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.meeting.waiting import Waiting
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.meeting_pb2_grpc import add_MeetingServiceServicer_to_server
from swarm.rpc.v1.probe_pb2_grpc import add_ProbeServiceServicer_to_server
from swarm.types import PeerRecord, PeerState
from tests.support.chain import eventually

CLOCK = SystemClock()


@dataclass(frozen=True)
class Host:
    entry: Entry
    point: MeetingPoint
    server: grpc.aio.Server


@asynccontextmanager
async def meeting_point(
    own: Identity | None = None, *, limits: MeetingLimits | None = None, authority: Authority | None = None,
    run_id: str = "",
) -> AsyncIterator[Host]:  # fmt: skip
    """Run a meeting point on a free port inside the block."""
    own = own or generate()
    guard = Guard(authority=authority, callers=Callers(CLOCK), clock=CLOCK, stage=lambda: 0)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard])
    point = MeetingPoint(
        own.peer_id, limits or MeetingLimits(), CLOCK, insecure=False, is_exchanging=lambda: False, run_id=run_id
    )
    add_MeetingServiceServicer_to_server(point, server)
    add_ProbeServiceServicer_to_server(ProbeServicer(is_exchanging=lambda: False, clock=CLOCK), server)
    port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(own))
    await server.start()
    try:
        yield Host(Entry(own.peer_id, f"127.0.0.1:{port}"), point, server)
    finally:
        await server.stop(None)


@dataclass
class Hidden:
    """A peer that waits at meeting points. Its server echoes messages, and records where calls come from."""

    own: Identity
    endpoint: str
    """The endpoint of its server, for callers on this machine."""
    waiting: Waiting
    callers: list[str]

    @property
    def record(self) -> PeerRecord:
        first, *others = self.waiting.endpoints
        return PeerRecord(
            peer_id=self.own.peer_id, announced_at=CLOCK.time(), stage=0, endpoint=first, other_endpoints=tuple(others),
            certificate_pem=self.own.certificate_pem, state=PeerState.SERVING,
        )  # fmt: skip


@asynccontextmanager
async def hidden_peer(
    points: Sequence[Entry], own: Identity | None = None, clock: Clock = CLOCK, run_id: str = ""
) -> AsyncIterator[Hidden]:
    """A peer that waits at these meeting points, once one of them has accepted it."""
    own = own or generate()
    callers: list[str] = []

    async def echo(request: bytes, context: Any) -> bytes:
        callers.append(context.peer())
        return request

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(own))
    await server.start()
    known = Points(own, insecure=False, run_id=run_id)
    waiting = Waiting(own, known, clock, server=("127.0.0.1", port), candidates=lambda: points)
    task = asyncio.create_task(waiting.run())
    try:
        await eventually(lambda: len(waiting.endpoints) == min(3, len(points)) or task.done())
        yield Hidden(own, f"127.0.0.1:{port}", waiting, callers)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(None)


async def echo(channel: grpc.aio.Channel, data: bytes = b"a", *, seconds: float = 5.0, waits: bool = True) -> bytes:
    """Send data to a server of tests, and return the data that it sends back; `waits` for it to be there."""
    call: Any = channel.unary_unary("/test/Echo")
    reply: bytes = await call(data, timeout=seconds, wait_for_ready=waits)
    return reply
