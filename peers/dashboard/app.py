"""A dashboard's web app: the page's files, the WebSocket over which it gets all that it shows, and the viewers.

A viewer sends its token, once, and nothing else. Every request passes the door first. Another site can have its own
name resolve to this machine (DNS rebinding), so the Host of a request must be an IP address, or a name that the user
gave.
"""

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from peers.shared import stopping
from swarm.rpc.endpoint import ip_of

State = Mapping[str, Any]
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{1,5})?")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
MOST_VIEWERS = 100
_TOKEN_SECONDS = 10.0
"""How long a viewer may take to send its token."""
_SEND_SECONDS = 20.0
"""How long sending a message may take. A viewer that reads nothing would otherwise block the sender."""
CLOSE_REFUSED, CLOSE_FULL, CLOSE_UNASKED = 4401, 1013, 1008
"""Codes with which viewers' connections are closed: the token is wrong, there are too many viewers, or the viewer sent
something else than its token."""
_STATIC = Path(__file__).parent / "static"


class Hub:
    def __init__(self, history: Callable[[], State]) -> None:
        """`history` gives the figures over time. Viewers get them only with the whole state: they add later figures
        themselves."""
        self._history = history
        self._state: State = {}
        self._number = 0
        self._patch = ""
        self._whole = ""
        self._news = asyncio.Event()

    def publish(self, state: State) -> None:
        """Replace the state. The caller must not change the object afterwards."""
        self._number += 1
        self._patch = _text({"number": self._number, "patch": merge_patch(self._state, state)})
        self._whole = ""
        self._state = state
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self) -> AsyncIterator[str]:
        """Messages for one viewer: the whole state as soon as there is one, and then its changes."""
        seen = -1
        while True:
            news = self._news
            if self._number in (0, seen):
                await news.wait()
                continue
            if seen == self._number - 1:
                text = self._patch
            else:
                # This text serves all viewers that come before the next publish.
                self._whole = self._whole or _text(
                    {"number": self._number, "whole": self._state, "history": self._history()}
                )
                text = self._whole
            seen = self._number
            yield text


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Merge Patch (RFC 7386) that turns `before` into `after`; the page applies it. Objects are compared field
    by field, and lists are replaced. A field that is null counts as missing."""
    patch: dict[str, Any] = {name: None for name in before if after.get(name) is None and before[name] is not None}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif value is not None and value != old:
            patch[name] = value
    return patch


def _text(message: State) -> str:
    return json.dumps(message, allow_nan=False, separators=(",", ":"))


class Door:
    """Refuses requests to another host's name, and WebSockets that another site's page opens."""

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        """`names` are those of this host, or of a proxy before it, besides its IP addresses and localhost."""
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        # Programs other than browsers send no Origin.
        origin = headers.get("origin") if scope["type"] == "websocket" else None
        if not self._is_own(host) or (origin is not None and not self._is_own_page(origin, host)):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await PlainTextResponse("this page has another name", status_code=421)(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _is_own(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = (match["name"] or match["ipv6"]).lower().rstrip(".")
        return name == "localhost" or name in self._names or ip_of(name) is not None

    def _is_own_page(self, origin: str, host: str) -> bool:
        """Whether this page, or the same page behind a proxy, opens the WebSocket. A proxy may put its own address in
        the place of the Host, as nginx does by default, and leaves the Origin."""
        place = urlsplit(origin).netloc.lower()
        match = _HOST.fullmatch(place)
        return place == host.lower() or (match is not None and match["name"] in self._names)


def page_of(hub: Hub, *, token: str | None, names: Collection[str]) -> ASGIApp:
    """The whole application. Without a token everybody may see it. `names` are those of this host, besides its IP
    addresses."""
    viewers = Viewers(hub, token)

    async def index(request: Request) -> FileResponse:
        return FileResponse(_STATIC / "index.html")

    routes = [
        Route("/", index),
        WebSocketRoute("/live", viewers.serve),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]
    return Door(Starlette(routes=routes), names=names)


class Viewers:
    def __init__(self, hub: Hub, token: str | None) -> None:
        self._hub = hub
        self._token = token
        self._room = MOST_VIEWERS

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        if self._room == 0:
            await socket.close(CLOSE_FULL)
            return
        self._room -= 1
        try:
            if not await self._is_admitted(socket):
                await socket.close(CLOSE_REFUSED)
                return
            await stopping.before(_until_heard(socket), self._tell(socket))
        except (WebSocketDisconnect, TimeoutError):
            # The viewer left, or did not send its token in time.
            pass
        finally:
            self._room += 1

    async def _is_admitted(self, socket: WebSocket) -> bool:
        """Whether the viewer sends the right token. Raises WebSocketDisconnect or TimeoutError if it sends nothing."""
        async with asyncio.timeout(_TOKEN_SECONDS):
            message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        said = message.get("text") or ""
        return self._token is None or hmac.compare_digest(said.encode(), self._token.encode())

    async def _tell(self, socket: WebSocket) -> None:
        # Sending raises one of these when a viewer has left or reads too slowly.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async for text in self._hub.follow():
                async with asyncio.timeout(_SEND_SECONDS):
                    await socket.send_text(text)


async def _until_heard(socket: WebSocket) -> None:
    if (await socket.receive())["type"] != "websocket.disconnect":
        await socket.close(CLOSE_UNASKED)
