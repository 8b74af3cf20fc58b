"""swarm-generate --serve: its address, its token, and what it needs."""

import json
import socket
import sys

import httpx2
import pytest

from peers.generate import program
from peers.generate.options import PROG, GenerateOptions
from peers.generate.server import Server
from peers.shared import stopping
from tests.support.scripted_model import RUN, ScriptedEngine, scripted_model


def _end(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which the program ends before it loads anything."""
    assert stopping.run_program(PROG, lambda: program.main(["--model", "nowhere", *arguments])) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_that_is_taken_is_one_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = _end(capsys, "--serve", f"{host}:{port}")
    assert said == (
        f"swarm-generate: error: --serve {host}:{port}: Address already in use; choose another address or port\n"
    )


def test_an_address_of_nobody_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end(capsys, "--serve", "192.0.2.1:8000").count("\n") == 1
    assert "--serve no..host:8000: " in _end(capsys, "--serve", "no..host:8000")


def test_a_port_alone_is_one_of_this_machine() -> None:
    assert GenerateOptions(model="m", serve="8000").address == ("127.0.0.1", 8000)
    assert GenerateOptions(model="m", serve="[::1]:0").address == ("::1", 0)
    assert GenerateOptions(model="m", serve="0.0.0.0:80").address == ("0.0.0.0", 80)


def test_without_its_libraries_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("peers.generate.server", "peers.shared.web", "swarm.generation.openai")
    for name in [name for name in sys.modules if name.startswith(own)]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "uvicorn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = _end(capsys, "--serve", "127.0.0.1:0")
    assert "--serve needs starlette and uvicorn; in swarm's folder: " in said
    assert "[serve]" in said


async def test_a_page_that_the_option_names_may_ask_and_no_other() -> None:
    for origins, allowed in (((), None), (("http://localhost:3000",), "http://localhost:3000")):
        server = Server(GenerateOptions(model="m", serve="localhost:0", serve_origin=origins), {})
        transport = httpx2.ASGITransport(server.app(scripted_model(ScriptedEngine())))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            page = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
            asked = await client.options("/v1/completions", headers=page)
            assert asked.headers.get("access-control-allow-origin") == allowed
            body = json.dumps({"model": RUN, "prompt": "say", "max_tokens": 5})
            headers = page | {"Content-Type": "application/json"}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert answer.headers.get("access-control-allow-origin") == allowed
            other = await client.get("/v1/models", headers={"Origin": "http://elsewhere"})
            assert "access-control-allow-origin" not in other.headers
        server.close()


def test_all_pages_need_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--serve-token" in _end(capsys, "--serve", "127.0.0.1:0", "--serve-origin", "*")
