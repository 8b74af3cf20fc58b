"""swarm-generate --serve: its address, its token, and what it needs."""

import json
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
