"""The proxy of the benches: what is held back, lost, or a long way."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import cast

import pytest

from scripts.benches.shared.throttle import DelayLine, Link, Throttle


@pytest.fixture
def throttle() -> Iterator[Throttle]:
    with Throttle() as throttle:
        yield throttle


class _Echo:
    """A client of a server that sends everything back, over a machine's lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def call(self, text: bytes, timeout_seconds: float) -> bytes | None:
        """Send a text, and return the answer; None if none came in time."""
        self._writer.write(text)
        return await self.answer(timeout_seconds)

    async def answer(self, timeout_seconds: float) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._reader.read(100)
        except TimeoutError:
            return None


Connect = Callable[[Link, str], Awaitable[_Echo]]


@pytest.fixture
async def connect(echo: tuple[str, list[bytes]]) -> AsyncIterator[Connect]:
    """Connects to an endpoint over a machine's lines, until the test is over and before the server ends."""
    writers = []

    async def connect(link: Link, endpoint: str) -> _Echo:
        reader, writer = await asyncio.open_connection(*link.proxy.split(":"))
        writers.append(writer)
        writer.write(f"CONNECT {endpoint} HTTP/1.1\r\nHost: {endpoint}\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        return _Echo(reader, writer)

    yield connect
    for writer in writers:
        writer.close()
        await writer.wait_closed()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[str, list[bytes]]]:
    """An echoing server: its endpoint, and what has arrived there."""
    arrived: list[bytes] = []
    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.append(task)
        while chunk := await reader.read(100):
            arrived.append(chunk)
            writer.write(chunk)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}", arrived
    await asyncio.wait(served, timeout=10.0)


async def test_what_is_held_back_or_comes_over_a_long_line_arrives_later(
    throttle: Throttle, connect: Connect, echo: tuple[str, list[bytes]]
) -> None:
    endpoint, arrived = echo
    caller, callee = throttle.link(), throttle.link()
    throttle.serve(endpoint, callee)
    client = await connect(caller, endpoint)
    throttle.hinder(caller, callee)
    assert await client.call(b"one", 0.3) is None
    assert not arrived
    throttle.clear(caller, callee)
    assert await client.answer(5.0) == b"one"
    throttle.round_trip_seconds = 0.2
    began_at = time.monotonic()
    assert await client.call(b"one", 5.0) == b"one"
    assert time.monotonic() - began_at > 0.2
    throttle.hinder(caller, callee, bytes_per_second=10.0)
    began_at = time.monotonic()
    assert await client.call(b"12345", 5.0) == b"12345"
    assert time.monotonic() - began_at > 0.4


class _Writer:
    """Stands in for a connection: what was written, with the loop's time."""

    def __init__(self) -> None:
        self.transport = self
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, chunk: bytes) -> None:
        self.written.append(chunk)


async def test_bytes_arrive_in_their_order_though_the_line_gets_shorter() -> None:
    loop, writer = asyncio.get_running_loop(), _Writer()
    line = DelayLine(cast(asyncio.StreamWriter, writer), loop)
    began_at = loop.time()
    line.send(b"first", 0.1)
    for number in range(20):
        line.send(b"%d" % number, 0.0)
    await line.end()
    assert loop.time() - began_at > 0.09
    assert writer.written == [b"first", *(b"%d" % number for number in range(20))]


async def test_an_answer_that_is_held_back_is_lost_with_its_connection(
    throttle: Throttle, connect: Connect, echo: tuple[str, list[bytes]]
) -> None:
    endpoint, arrived = echo
    caller, callee, stranger = (throttle.link() for _ in range(3))
    throttle.serve(endpoint, callee)
    client, other = await connect(caller, endpoint), await connect(stranger, endpoint)
    throttle.hinder(callee, caller)
    assert await client.call(b"lost", 0.3) is None
    assert arrived == [b"lost"], "the work was done"
    throttle.break_connections(caller, callee)
    assert await client.answer(5.0) == b""
    throttle.clear(callee, caller)
    assert await (await connect(caller, endpoint)).call(b"again", 5.0) == b"again"
    assert await other.call(b"not concerned", 5.0) == b"not concerned"
