"""The address and the secret of a program that serves HTTP, as given on its command line."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from peers.shared import web
from peers.shared.web import Listener, find_secret

VARIABLE = "SWARM_SOME_TOKEN"


def _find(option_value: str | None, environment: dict[str, str]) -> str | None:
    return find_secret(option_value, environment, option="--some-token", variable=VARIABLE)


@pytest.mark.parametrize("secret", ["", "a b", "é", "a\n"])
def test_a_secret_that_no_client_can_send_is_refused(secret: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--some-token must be"):
        _find(secret, {})
    with pytest.raises(ValueError, match=f"{VARIABLE} must be"):
        _find(None, {VARIABLE: secret})
    with pytest.raises(FileNotFoundError):
        _find(f"@{tmp_path / 'nothing'}", {})


@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_an_address_is_taken_at_once(host: str, is_local: bool) -> None:
    listener = Listener(host, 0, option="--port")
    port = int(listener.url.rpartition(":")[2])
    with pytest.raises(ValueError, match=rf"^--port .*:{port}: Address already in use; choose another"):
        Listener(host, port, option="--port")
    assert listener.is_local == is_local
    listener.close()


@asynccontextmanager
async def _served(on_request: Callable[[], None] = lambda: None) -> AsyncIterator[tuple[str, int]]:
    """Run a server that answers at once or slowly, and yield its address."""

    async def answer(request: Request) -> PlainTextResponse:
        on_request()
        await asyncio.sleep(0.8 if request.url.path == "/slow" else 0.0)
        return PlainTextResponse("here")

    listener, stop = Listener("127.0.0.1", 0, option="--port"), asyncio.Event()
    app = Starlette(routes=[Route("/{path:path}", answer)])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listener.serve(app, stop))
        yield "127.0.0.1", int(listener.url.rpartition(":")[2])
        stop.set()


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(0.02)
        writer.write(b"a")


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the server closes the connection, and return whether it did so without another answer."""
    async with asyncio.timeout(10.0):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: "], ids=["nothing", "half of the headers"])
async def test_a_connection_that_brings_no_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a connection that sends a byte now and then."""
    monkeypatch.setattr(web, "REQUEST_SECONDS", 0.3)
    async with _served() as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        dripping = asyncio.create_task(_drip(writer)) if sent else None
        assert await _is_closed(reader)
        if dripping is not None:
            dripping.cancel()
        writer.close()


async def test_so_is_one_that_brings_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # The time is short only once the first request is there, however slow this machine is.
    async with _served(lambda: monkeypatch.setattr(web, "REQUEST_SECONDS", 0.3)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nX-A: ")
        assert (await asyncio.wait_for(reader.readuntil(b"here"), 10.0)).startswith(b"HTTP/1.1 200")
        dripping = asyncio.create_task(_drip(writer))
        assert await _is_closed(reader)
        dripping.cancel()
        writer.close()


async def test_one_that_is_answered_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at once are answered in turn, however long that takes."""
    monkeypatch.setattr(web, "REQUEST_SECONDS", 0.6)
    async with _served() as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        for _ in range(2):
            assert (await asyncio.wait_for(reader.readuntil(b"here"), 10.0)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 3)
    async with _served() as address:
        connections = [await asyncio.open_connection(*address) for _ in range(4)]
        assert await asyncio.wait_for(connections[-1][0].read(), 10.0) == b""
        for _, writer in connections:
            writer.close()
