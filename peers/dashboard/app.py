"""A dashboard's web app: the page's static files, and the WebSocket over which the page gets all that it shows.

Used by program.py. It is read-only: a viewer sends its token, once, and nothing else.
"""

import asyncio
import contextlib
import hmac
from collections.abc import Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from peers.dashboard.door import Door
from peers.dashboard.hub import Hub
from peers.shared import stopping

MOST_VIEWERS = 100
_TOKEN_SECONDS = 10.0
"""How long a viewer may take to send its token."""
_SEND_SECONDS = 20.0
"""How long sending a message may take. A viewer that reads nothing would otherwise block the sender."""
CLOSE_REFUSED, CLOSE_FULL, CLOSE_UNASKED = 4401, 1013, 1008
"""Codes with which viewers' connections are closed: the token is wrong, there are too many viewers, or the viewer sent
something else than its token."""
_STATIC = Path(__file__).parent / "static"


def page_of(hub: Hub, *, token: str | None, names: Collection[str]) -> ASGIApp:
    """The whole application.

    Args:
        token: the token that a viewer must have; None lets everybody see.
        names: names of this host, besides its IP addresses.
    """
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
    """The viewers that look at the page now."""

    def __init__(self, hub: Hub, token: str | None) -> None:
        self._hub = hub
        self._token = token
        self._room = MOST_VIEWERS

    async def serve(self, socket: WebSocket) -> None:
        """Send one viewer the state and its changes until it goes."""
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
    """Return once the viewer has gone. If it sends anything, close its connection."""
    if (await socket.receive())["type"] != "websocket.disconnect":
        await socket.close(CLOSE_UNASKED)
