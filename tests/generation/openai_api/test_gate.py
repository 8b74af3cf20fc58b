"""The checks that every request passes, and its end when the client disconnects."""

import asyncio
import json
import random
from collections.abc import MutableMapping
from typing import Any

import pytest

from swarm.generation.openai_api.answers import END_OF_STREAM, STILL_HERE
from swarm.generation.openai_api.app import Api
from swarm.generation.openai_api.gate import MOST_BODY_BYTES, Gate
from tests.support.manual_clock import ManualClock
from tests.support.scripted_model import RUN, ScriptedEngine, scripted_model
from tests.support.virtual_time import in_virtual_time

BODY = json.dumps({"model": RUN, "prompt": "say", "max_tokens": 50}).encode()
STREAM = json.dumps({"model": RUN, "prompt": "say", "max_tokens": 50, "stream": True}).encode()


class _Exchange:
    """One request as the web server sees it: what the client sends, when it disconnects, and what it gets."""

    def __init__(self, gate: Gate, pieces: list[bytes], **headers: str) -> None:
        names = {"content_type": "application/json"} | headers
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.reads_on = asyncio.Event()
        self.reads_on.set()
        self._pieces = pieces
        self._hung_up = asyncio.Event()
        self._scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "root_path": "", "scheme": "http", "server": ("127.0.0.1", 80),
            "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in names.items()],
        }  # fmt: skip
        self.task = asyncio.create_task(gate(self._scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._hung_up.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._pieces:
            return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.reads_on.wait()
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")


def _gate(engine: ScriptedEngine, *, token: str | None = None, most_requests: int = 2) -> Gate:
    api = Api(scripted_model(engine), default_tokens=9, clock=ManualClock(), numbers=random.Random(0))
    return Gate(api.app(), token=token, most_requests=most_requests)


async def _status(gate: Gate, pieces: list[bytes], **headers: str) -> int | None:
    exchange = _Exchange(gate, pieces, **headers)
    await exchange.task
    return exchange.status


async def test_only_the_token_lets_in() -> None:
    gate = _gate(ScriptedEngine(), token="s3cret")
    for authorization in ("Bearer s3cret", "bearer s3cret", "Bearer  s3cret"):
        assert await _status(gate, [BODY], authorization=authorization) == 200
    for authorization in ("", "s3cret", "Basic s3cret", "Bearer", "Bearer s3cre", "Bearer s3crets", "Bearer \xff"):
        exchange = _Exchange(gate, [BODY], authorization=authorization)
        await exchange.task
        assert exchange.status == 401
        assert exchange.headers[b"www-authenticate"] == b"Bearer"
        assert json.loads(exchange.body)["error"]["code"] == "invalid_api_key"
    assert await _status(gate, [BODY]) == 401


async def test_a_body_may_come_in_pieces_and_be_so_large() -> None:
    gate = _gate(ScriptedEngine())
    assert await _status(gate, [BODY[:5], b"", BODY[5:]]) == 200
    spaces = b" " * (MOST_BODY_BYTES - len(BODY))
    assert await _status(gate, [BODY, spaces]) == 200
    exchange = _Exchange(gate, [BODY, spaces, b" "])
    await exchange.task
    assert exchange.status == 413
    assert "larger than 4 MiB" in exchange.body.decode()
    # Reading the body is limited in time.
    assert await _status(gate, [spaces] * 1000) == 413


async def test_a_body_is_json_and_says_so() -> None:
    gate = _gate(ScriptedEngine())
    assert await _status(gate, [BODY], content_type="application/json; charset=utf-8") == 200
    assert await _status(gate, [BODY], content_type="text/plain") == 415


@in_virtual_time
async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    gate = _gate(ScriptedEngine())
    exchange = _Exchange(gate, [])
    await asyncio.sleep(29.0)
    assert exchange.status is None
    await asyncio.wait_for(exchange.task, 2.0)
    assert exchange.status == 408
    exchange = _Exchange(gate, [])
    exchange.hang_up()
    await asyncio.wait_for(exchange.task, 2.0)
    assert exchange.status is None


@in_virtual_time
async def test_so_many_are_served_at_once_and_others_told_to_come_again() -> None:
    engine = ScriptedEngine()
    gate = _gate(engine, most_requests=2)
    engine.may_go_on.clear()
    exchanges = [_Exchange(gate, [BODY]) for _ in range(5)]
    await asyncio.sleep(1.0)
    assert [exchange.status for exchange in exchanges] == [None, None, 429, 429, 429]
    assert int(exchanges[-1].headers[b"retry-after"]) > 0
    engine.may_go_on.set()
    await asyncio.gather(*(exchange.task for exchange in exchanges))
    assert [exchange.status for exchange in exchanges[:2]] == [200, 200]
    assert await _status(gate, [BODY]) == 200


@in_virtual_time
async def test_a_stream_that_waits_its_turn_has_headers_and_signs_of_life() -> None:
    engine = ScriptedEngine()
    engine.may_go_on.clear()
    exchange = _Exchange(_gate(engine), [STREAM])
    await asyncio.sleep(1.5)
    assert exchange.status == 200
    await asyncio.sleep(12.0)
    assert exchange.body == 2 * STILL_HERE
    engine.may_go_on.set()
    await exchange.task
    assert exchange.body.endswith(END_OF_STREAM)


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("said_something", [False, True])
def test_a_client_that_hangs_up_frees_its_place(body: bytes, said_something: bool) -> None:
    @in_virtual_time
    async def check() -> None:
        engine = ScriptedEngine()
        gate = _gate(engine, most_requests=1)
        exchange = _Exchange(gate, [body])
        exchange.reads_on.clear()
        if not said_something:
            engine.may_go_on.clear()
        await asyncio.sleep(1.0)
        assert engine.under_way == (0 if body is BODY and said_something else 1)
        exchange.hang_up()
        await asyncio.wait_for(exchange.task, 0.1)
        assert engine.under_way == 0
        engine.may_go_on.set()
        assert await _status(gate, [body]) == 200

    check()


@in_virtual_time
async def test_a_client_that_does_not_read_on_is_left() -> None:
    engine = ScriptedEngine()
    exchange = _Exchange(_gate(engine), [STREAM])
    exchange.reads_on.clear()
    await asyncio.sleep(29.0)
    assert engine.under_way == 1
    await asyncio.wait_for(exchange.task, 2.0)
    assert engine.under_way == 0
