"""A server begins and ends whatever is cancelled meanwhile, and one port is gRPC's and the DHT's."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from scripts.benches.shared.ports import free_ports
from swarm.rpc import serving
from swarm.rpc.callers import caller_of, peer_of
from swarm.rpc.meeting.check import MULTISTREAM, is_node
from swarm.rpc.serving import LIBP2P, SERVER_OPTIONS, Front, bind_server, server_options, start_server
from swarm.rpc.tls import PINNED_OPTIONS, pinned_credentials, server_credentials
from tests.support.locked import OPEN
from tests.support.meeting import echo
from tests.support.proxy import Proxy


async def test_a_server_whose_start_was_cancelled_can_be_stopped() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = bind_server(server, "127.0.0.1", 0, None)
    starting = asyncio.create_task(start_server(server))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await server.stop(None)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


async def _node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        writer.write(await reader.readexactly(len(MULTISTREAM)))
        await writer.drain()
    writer.close()


async def test_the_first_byte_decides_and_limits_see_the_caller_s_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "FIRST_SECONDS", 0.5)
    seen: list[tuple[str, str]] = []

    async def say(request: bytes, context: Any) -> bytes:
        seen.append((context.peer(), peer_of(context)))
        assert caller_of(context) == "ipv4:127.0.0.1"
        return request

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(say)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    grpc_port = bind_server(server, "127.0.0.1", 0, server_credentials(OPEN))
    await server.start()
    (port,) = free_ports(1)
    async with await asyncio.start_server(_node, "127.0.0.1", 0) as node:
        front = Front(grpc_port, node.sockets[0].getsockname()[1])
        async with front.listening("127.0.0.1", port):
            credentials = pinned_credentials(OPEN.certificate_pem)
            target = f"127.0.0.1:{port}"
            async with grpc.aio.secure_channel(target, credentials, options=PINNED_OPTIONS) as channel:
                assert await echo(channel, b"a" * 100_000) == b"a" * 100_000
            assert await is_node("127.0.0.1", port)
            # What is not TLS reaches the same server, which decides.
            with pytest.raises(grpc.aio.AioRpcError):
                await echo(grpc.aio.insecure_channel(target), b"a", waits=False)
            for first in (b"G", b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(first)
                assert await reader.read() == b"", "what is neither, or says nothing, is closed"
                writer.close()
            # The DHT sees where its caller is just as little, and gets what the caller sent from the first byte on.
            assert MULTISTREAM.startswith(LIBP2P)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    await server.stop(None)
    ((here, outer),) = seen
    assert here != outer
    assert outer.startswith("ipv4:127.0.0.1:")


async def test_one_address_does_not_get_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 16)
    (port,) = free_ports(1)
    (node_port,) = free_ports(1)
    async with (
        await asyncio.start_server(_node, "127.0.0.1", node_port),
        Front(1, node_port).listening("127.0.0.1", port),
    ):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await opened[-1][0].read() == b"", "an eighth of all are its share"
        opened.append(await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)))
        opened[-1][1].write(MULTISTREAM)
        assert await opened[-1][0].read() == MULTISTREAM
        for _, writer in opened:
            writer.close()


async def test_the_calls_of_a_frozen_caller_end_and_those_of_one_that_waits_do_not() -> None:
    """A ping tells them apart: a frozen machine's kernel goes on acknowledging what it receives."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return request

    server = grpc.aio.server(options=server_options(50, 250))
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = bind_server(server, "127.0.0.1", 0, None)
    await server.start()
    async with Proxy("127.0.0.1", port) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
        calling = asyncio.create_task(echo(channel, seconds=60.0))
        await begun.wait()
        await asyncio.sleep(0.6)  # The server has pinged it meanwhile.
        assert not ended.is_set()
        proxy.stall()
        async with asyncio.timeout(10.0):
            await ended.wait()
        calling.cancel()
    await server.stop(None)
