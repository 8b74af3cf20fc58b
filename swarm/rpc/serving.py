"""The server's side of gRPC: the port at which it listens, and the messages of a stream, each with a deadline.

Also the check that every service makes first: whether a request is meant for this peer.
"""

import asyncio
from typing import Any

import grpc

from swarm.errors import DeadlineExceeded, IncompatibleVersion, WrongRun, WrongStage
from swarm.rpc.callers import MAX_CALLS
from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.tls import MAX_MESSAGE_BYTES, Options
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOL_VERSION


def check_address(address: Address, *, run_id: str, stage: int) -> None:
    """Raise IncompatibleVersion, WrongRun or WrongStage unless a request names this protocol, run and stage."""
    if address.protocol_version != PROTOCOL_VERSION:
        raise IncompatibleVersion(
            f"protocol version {address.protocol_version} is not {PROTOCOL_VERSION}, which this peer speaks: "
            "use the same release of swarm on every machine"
        )
    if address.run_id != run_id:
        raise WrongRun(f"run {address.run_id[:80]!r} is not {run_id!r}, which this peer serves")
    if address.stage != stage:
        raise WrongStage(f"this peer serves stage {stage}, not {address.stage}")


MESSAGE_SECONDS = 30.0
"""How long a server waits at most for the next message of a stream, and for its caller to take one."""

SERVER_OPTIONS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The most calls on one connection; gRPC itself holds further ones back, or refuses them.
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Otherwise two servers could share one port, and get each other's calls.
    ("grpc.so_reuseport", 0),
)


def bind_server(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Let a server, made with SERVER_OPTIONS, listen on a port. Port 0 takes a free port. Without credentials there is
    no TLS.

    Args:
        host: an IP address; empty for all addresses of this machine, IPv4 and IPv6.

    Returns:
        The port.

    Raises:
        ValueError: the port is in use, or the host is no address of this machine.
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
    """Send a message to the caller over the stream whose ServicerContext is `context`.

    Raises:
        DeadlineExceeded: the caller takes nothing.
    """
    try:
        async with asyncio.timeout(seconds):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded(f"the caller took nothing for {seconds:.0f} s") from None


async def receive(context: Any, seconds: float = MESSAGE_SECONDS) -> Any:
    """Wait for the next message of the stream whose ServicerContext is `context`; None at its end.

    Raises:
        DeadlineExceeded: the caller sends nothing.
    """
    try:
        async with asyncio.timeout(seconds):
            message = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"no message for {seconds:.0f} s") from None
    return None if message is grpc.aio.EOF else message
