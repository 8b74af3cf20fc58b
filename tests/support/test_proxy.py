"""The proxy delays, stalls, cuts and refuses connections as its methods say."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.proxy import Proxy


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def _proxy_to_echo() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, Proxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


async def _connect(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def _round_trip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    started = time.monotonic()
    writer.write(b"x")
    async with asyncio.timeout(10):
        assert await reader.readexactly(1) == b"x"
    return time.monotonic() - started


async def test_stall_loses_nothing() -> None:
    async with _proxy_to_echo() as proxy:
        reader, writer = await _connect(proxy)
        proxy.stall()
        trip = asyncio.create_task(_round_trip(reader, writer))
        await asyncio.sleep(0.1)
        assert not trip.done()
        proxy.resume()
        assert await trip >= 0.1
        writer.close()


async def test_cut_resets_both_sides_and_new_connections_work() -> None:
    async with _proxy_to_echo() as proxy:
        reader, writer = await _connect(proxy)
        await _round_trip(reader, writer)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), timeout=10)
        writer.close()
        reader, writer = await _connect(proxy)
        await _round_trip(reader, writer)
        assert proxy.num_connections == 1
        writer.close()


async def test_refused_and_unreachable_are_resets() -> None:
    async with _proxy_to_echo() as proxy:
        proxy.refuse()
        reader, writer = await _connect(proxy)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), timeout=10)
        writer.close()
    async with Proxy("127.0.0.1", 1) as proxy:
        reader, writer = await _connect(proxy)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), timeout=10)
        writer.close()
