"""The page over HTTP: who may see it, its headers about scripts, and how many viewers there may be."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from peers.dashboard import app as app_module
from peers.dashboard.app import CLOSE_FULL, CLOSE_REFUSED, CLOSE_UNASKED, Hub, merge_patch, page_of
from peers.shared.web import Listener
from tests.support.chain import PATIENCE_SECONDS

STATIC = Path(app_module.__file__).parent / "static"


@asynccontextmanager
async def _page(token: str | None = None) -> AsyncIterator[tuple[str, Hub]]:
    hub = Hub(dict)
    hub.publish({"runs": {}})
    listener, stop = Listener("127.0.0.1", 0, option="--port"), asyncio.Event()
    page = page_of(hub, token=token, names=["Swarm.Example"])
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listener.serve(page, stop, with_websockets=True))
            try:
                yield listener.url, hub
            finally:
                stop.set()
    finally:
        listener.close()


async def _said(url: str, token: str = "", **options: Any) -> Any:
    """The first message to a viewer, or the code with which its connection is closed."""
    async with connect(f"{url.replace('http', 'ws')}/live", **options) as socket:
        try:
            await socket.send(token)
            return json.loads(await asyncio.wait_for(socket.recv(), 5.0))
        except ConnectionClosed:
            return socket.close_code


async def test_the_page_and_all_that_it_names_are_here() -> None:
    async with _page() as (url, _), httpx2.AsyncClient(base_url=url) as client:
        index = await client.get("/")
        assert index.headers["content-type"].startswith("text/html")
        names = re.findall(r'(?:src|href)="(static/[^"]+)"', index.text)
        modules = {path.name for path in STATIC.glob("*.js")}
        imported = {name for path in STATIC.glob("*.js") for name in re.findall(r'from "\./(.+?)"', path.read_text())}
        assert imported | {Path(name).name for name in names} >= modules
        for name in [*names, *(f"static/{module}" for module in imported)]:
            assert (await client.get(name)).status_code == 200, name
        for hostile in ("/static/../app.py", "/static/%2e%2e/app.py", "/app.py", "/static/"):
            assert (await client.get(hostile)).status_code == 404


def test_the_page_names_no_other_place_and_makes_no_markup_of_text() -> None:
    own = [path for path in STATIC.iterdir() if path.suffix in (".js", ".html", ".css")]
    assert len(own) > 8
    for path in own:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|\bstyle=", text
        ), path
    assert "MIT" in (STATIC / "uplot" / "LICENSE").read_text()


async def test_a_browser_runs_nothing_but_the_page_s_own_files() -> None:
    async with _page() as (url, _), httpx2.AsyncClient(base_url=url) as client:
        for path in ("/", "/static/main.js", "/nothing"):
            headers = (await client.get(path)).headers
            policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers


async def test_a_name_that_is_not_the_page_s_own_is_refused() -> None:
    own = [
        "127.0.0.1:8080", "[::1]:8080", "localhost", "LocalHost:1", "localhost.", "192.0.2.1", "swarm.example",
    ]  # fmt: skip
    others = [
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1", "evil.example@localhost",
        "localhost/evil.example",
    ]  # fmt: skip
    async with _page() as (url, _), httpx2.AsyncClient(base_url=url) as client:
        for host in own + others:
            answer = await client.get("/", headers={"Host": host})
            assert (answer.status_code == 200) == (host in own), host
            assert host in own or "swarm" not in answer.text


async def test_another_site_s_page_opens_no_websocket() -> None:
    async with _page() as (url, _):
        assert await _said(url) == {"number": 1, "whole": {"runs": {}}, "history": {}}
        assert (await _said(url, origin=url))["number"] == 1
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"{url}.evil.example"):
            with pytest.raises(InvalidStatus):
                await _said(url, origin=origin)
        with pytest.raises(InvalidStatus):
            await _said(url, additional_headers={"Host": "evil.example"}, origin="http://evil.example")


@pytest.mark.parametrize("origin", ["https://swarm.example:8443"])
async def test_the_page_behind_a_proxy_opens_its_websocket(origin: str) -> None:
    """As by nginx's default, the Host is the proxy's target, and the Origin what the browser shows."""
    async with _page() as (url, _):
        assert (await _said(url, origin=origin))["number"] == 1
        for other in ("https://evil.example", "https://swarm.example.evil.example", "http://localhost:1"):
            with pytest.raises(InvalidStatus):
                await _said(url, origin=other)


async def test_a_locked_page_tells_nothing_without_its_token() -> None:
    async with _page(token="s3cret") as (url, _):
        for token in ("", "wrong", "s3cret ", "é"):
            assert await _said(url, token) == CLOSE_REFUSED
        assert (await _said(url, "s3cret"))["number"] == 1


async def test_a_viewer_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_TOKEN_SECONDS", 0.1)
    async with _page(token="s3cret") as (url, _), connect(f"{url.replace('http', 'ws')}/live") as socket:
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 5.0)


@pytest.mark.parametrize("message", ["again", "x" * 5000])
async def test_a_viewer_that_speaks_is_sent_away(message: str | bytes) -> None:
    async with _page() as (url, _), connect(f"{url.replace('http', 'ws')}/live") as socket:
        await socket.send("")
        await socket.recv()
        await socket.send(message)
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 5.0)
        assert socket.close_code in (CLOSE_UNASKED, 1009)


async def test_there_is_room_for_so_many_viewers_and_again_once_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MOST_VIEWERS", 2)
    async with _page() as (url, hub):
        address = f"{url.replace('http', 'ws')}/live"
        async with connect(address) as first:
            async with connect(address) as second:
                for socket in (first, second):
                    await socket.send("")
                    await socket.recv()
                assert await _said(url) == CLOSE_FULL
                hub.publish({"runs": {"a": {}}})
                assert json.loads(await second.recv()) == json.loads(await first.recv())
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await _said(url) == CLOSE_FULL:  # noqa: ASYNC110 - the server notices when it does
                    await asyncio.sleep(0.01)


_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
_OBJECTS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), _LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), _LEAVES | inner, max_size=3),
    max_leaves=12,
)


def apply(target: Any, patch: Any) -> Any:
    """Apply a merge patch: RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply(merged.get(name), value)
    return merged


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return value


@settings(max_examples=20)
@given(_OBJECTS, _OBJECTS)
def test_a_patch_leads_from_one_state_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = merge_patch(before, after)
    assert _without_nulls(apply(before, patch)) == _without_nulls(after)
    assert merge_patch(after, after) == {}


async def _next(viewer: AsyncIterator[str]) -> Any:
    return json.loads(await asyncio.wait_for(anext(viewer), 5.0))


async def test_a_viewer_that_is_slow_gets_everything_again() -> None:
    hub = Hub(dict)
    viewer = hub.follow()
    for number in range(4):
        hub.publish({"a": number})
    assert (await _next(viewer))["whole"] == {"a": 3}
    hub.publish({"a": 4})
    hub.publish({"a": 5})
    assert (await _next(viewer))["whole"] == {"a": 5}
