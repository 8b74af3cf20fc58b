"""Serves an ASGI app over HTTP at an address of this machine, until it is told to stop.

Needs the extra serve.
"""

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from peers.shared.cli import spelled_out
from swarm.rpc.endpoint import endpoint_of

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""The names by which a browser on this machine reaches it, as the Host header has them."""
MOST_CONNECTIONS = 512
REQUEST_SECONDS = 20.0
"""How long a connection may take until the headers of its first or next request have arrived."""
_GOODBYE_SECONDS = 3
"""How long answers under way may still take once the program is told to stop."""
_MOST_MESSAGE_BYTES = 4096
"""The longest message that a browser may send over a WebSocket."""


class Listener:
    def __init__(self, host: str, port: int, *, option: str, host_option: str | None = None) -> None:
        """Take the address; port 0 takes a free one. `option` is the option in which the user gave the address, or only
        the port. `host_option` is the option in which the user gave the host, if it is another option. Raises
        ValueError if the address cannot be taken."""
        self._socket = _bound(host, port, option, host_option)
        host, port = self._socket.getsockname()[:2]
        self.is_local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        """Whether only processes of this machine can reach it."""
        self.url = f"http://{endpoint_of(host, port)}"

    async def serve(self, app: ASGIApp, stop: asyncio.Event, *, with_websockets: bool = False) -> None:
        """Answer requests until `stop` is set. Answers under way then have a few seconds. The address is free
        afterwards, also when this is cancelled."""
        server = _Uvicorn(_config(app, with_websockets=with_websockets))
        with self._socket:
            async with asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(server.end_after(stop))
                await server.serve(sockets=[self._socket])
                ending.cancel()

    def close(self) -> None:
        self._socket.close()


class _Connection(H11Protocol):
    """A connection that is closed if it brings no request for REQUEST_SECONDS, or if there are too many connections.

    uvicorn itself waits without limit for the first request, and for the rest of a request that has begun.
    """

    _waiting: asyncio.TimerHandle | None = None
    _is_upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        self._is_upgraded = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Wait for a request, unless one is being answered."""
        if self._is_upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._wait_no_more()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Uvicorn(uvicorn.Server):
    """The web server without its handling of signals: the program handles them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def end_after(self, stop: asyncio.Event) -> None:
        """Once `stop` is set, take no more requests, and end when all present ones have been answered or time is up."""
        await stop.wait()
        self.should_exit = True


def _bound(host: str, port: int, option: str, host_option: str | None) -> socket.socket:
    """A socket with this address. Raises ValueError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            # From here on another program that tries to take the address gets an error.
            listening.listen(MOST_CONNECTIONS)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "there is no such host"
        if host_option is not None and _is_of_host(error):
            raise ValueError(f"{host_option} {host}: {reason}; choose another address") from None
        raise ValueError(f"{option} {endpoint_of(host, port)}: {reason}; choose another address or port") from None
    return listening


def _is_of_host(error: OSError | UnicodeError) -> bool:
    """Whether the error is about the host, so that no other port would help."""
    return isinstance(error, (socket.gaierror, UnicodeError)) or error.errno == errno.EADDRNOTAVAIL


def find_secret(option_value: str | None, environment: Mapping[str, str], *, option: str, variable: str) -> str | None:
    """The secret that users must send, from the option or else from the environment; None if neither has one. Raises
    ValueError if it is empty, or has characters that no header can hold, and OSError if the file that it names cannot
    be read."""
    name, secret = (option, option_value) if option_value is not None else (variable, environment.get(variable))
    if secret is None:
        return None
    secret = spelled_out(secret)
    if not secret or not all("!" <= character <= "~" for character in secret):
        raise ValueError(f"{name} must be letters, digits and signs of ASCII, without spaces, and not empty")
    return secret


def _config(app: ASGIApp, *, with_websockets: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=_Connection,
        ws="websockets-sansio" if with_websockets else "none",
        ws_max_size=_MOST_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        # Its log lines would quote the users' requests, so they are switched off.
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=_GOODBYE_SECONDS,
    )
