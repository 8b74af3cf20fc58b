"""Guarded servers (guarded.py), which end with their test."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from swarm.credentials.identity import Identity
from swarm.rpc import tls
from swarm.rpc.callers import MAX_KEPT_BYTES, Callers
from swarm.rpc.channels import ChannelPool
from swarm.rpc.guard import Guard
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.types import PeerRecord, PeerState
from tests.rpc.guarded import Averaging, Clock, Directory, Server, handlers
from tests.support.locked import PEER
from tests.support.manual_clock import ManualClock


async def _echo(request: bytes, context: Any) -> bytes:
    return request


@pytest.fixture
async def pool() -> AsyncIterator[ChannelPool]:
    pool = ChannelPool()
    yield pool
    await pool.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """Starts servers on loopback, which end with their test. It returns the port."""
    async with AsyncExitStack() as stack:

        async def serve_one(
            handler: Any = _echo, *, credentials: grpc.ServerCredentials | None = None, port: int = 0
        ) -> int:
            server = grpc.aio.server(options=SERVER_OPTIONS)
            handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(handler)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
            bound = bind_server(server, "127.0.0.1", port, credentials)
            await server.start()
            stack.push_async_callback(server.stop, None)
            return bound

        yield serve_one


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start_one(
            identity: Identity = PEER, *, max_calls: int = 2, max_bytes: int = MAX_KEPT_BYTES
        ) -> Server:
            # The clock that counts the rate of calls stands still.
            clock, callers = Clock(), Callers(ManualClock(), max_calls=max_calls, max_bytes=max_bytes)
            guarding = Guard(authority=identity.authority, callers=callers, clock=clock, stage=lambda: running.stage)
            server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guarding])
            directory = Directory()
            add_DirectoryServiceServicer_to_server(directory, server)
            averaging = Averaging()  # type: ignore[abstract]
            add_AveragingServiceServicer_to_server(averaging, server)
            add_HealthServicer_to_server(HealthServicer(), server)
            # Of two handlers of one call gRPC takes the first.
            server.add_generic_rpc_handlers(tuple(handlers()))
            port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(identity))
            record = PeerRecord(
                peer_id=identity.peer_id, stage=0, announced_at=0.0, state=PeerState.SERVING,
                endpoint=f"127.0.0.1:{port}", certificate_pem=identity.certificate_pem,
            )  # fmt: skip
            running = Server(record, callers, clock, averaging, directory)
            await server.start()
            stack.push_async_callback(server.stop, None)
            return running

        yield start_one
