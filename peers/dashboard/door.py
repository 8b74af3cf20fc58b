"""Decides which requests a dashboard answers, and adds security headers to its answers.

Every request to app.py passes here first. Another site can have its own name resolve to this machine (DNS rebinding),
so the Host of a request must be an IP address, or a name that the user gave.
"""

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.rpc.endpoint import ip_of

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


class Door:
    """Refuses requests to another host's name, and WebSockets that another site's page opens."""

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        """
        Args:
            names: names of this host, or of a proxy before it, besides its IP addresses and localhost.
        """
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
