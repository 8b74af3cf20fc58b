"""--serve: the model over HTTP, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import ipaddress
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from peers.generate.options import GenerateOptions
from peers.shared import process
from swarm.generation.openai_api.app import Api
from swarm.generation.openai_api.gate import Gate
from swarm.generation.text_model import TextModel
from swarm.machine.clock import SystemClock

TOKEN_VARIABLE = "SWARM_SERVE_TOKEN"
MOST_WAITING = 64
"""Requests that wait while others are answered; one more is told to come again."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MOST_CONNECTIONS = 512
_GOODBYE_SECONDS = 3
"""For answers under way, once the program is to end."""


class Server:
    """An address that has been taken, to serve a model at."""

    def __init__(self, options: GenerateOptions, environment: Mapping[str, str]) -> None:
        """Take the address.

        Raises:
            ValueError: the address cannot be had, or the token is none.
            OSError: the file with the token cannot be read.
        """
        self._most_tokens = options.most_tokens
        self._most_requests = options.max_sequences + MOST_WAITING
        self._token = find_token(options.serve_token, environment)
        self._socket = _bound(*options.address)
        host, port = self._socket.getsockname()[:2]
        self._is_local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def serve(self, model: TextModel) -> None:
        """Answer requests until Ctrl-C or SIGTERM. Answers under way then have a few seconds."""
        stop, server = process.stop_event(), _Uvicorn(_config(self._app(model)))
        if not self._is_local and self._token is None:
            _say(f"warning: everybody who reaches {self._url} can use the model: lock it with --serve-token @FILE")
        _say(f"serves {model.name} at {self._url}")
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[self._socket]))
            stopping = tasks.create_task(stop.wait())
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            server.end()
            stopping.cancel()

    def close(self) -> None:
        """Give the address back."""
        self._socket.close()

    def _app(self, model: TextModel) -> ASGIApp:
        numbers = random.SystemRandom()
        api = Api(model, default_tokens=self._most_tokens, clock=SystemClock(), numbers=numbers)
        gate = Gate(api.app(), token=self._token, most_requests=self._most_requests)
        if self._token is None and self._is_local:
            # A page in a browser may have its own name stand for this machine, and would then be let in.
            return TrustedHostMiddleware(gate, allowed_hosts=_LOCAL_NAMES)
        return gate


class _Uvicorn(uvicorn.Server):
    """The web server. Signals are the program's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Take no more requests, and end once those that are there have been answered, or time is up."""
        self.should_exit = True


def find_token(option: str | None, environment: Mapping[str, str]) -> str | None:
    """What requests must bring: of the option, or of the environment; None if neither says so.

    Raises:
        ValueError: it is empty, or has what no header can hold.
        OSError: the file that it names cannot be read.
    """
    name, token = ("--serve-token", option) if option is not None else (TOKEN_VARIABLE, environment.get(TOKEN_VARIABLE))
    if token is None:
        return None
    if token.startswith("@"):
        token = Path(token[1:]).read_text(encoding="utf-8", errors="replace").strip()
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{name} must be letters, digits and signs of ASCII, without spaces, and not empty")
    return token


def _bound(host: str, port: int) -> socket.socket:
    """A socket with this address. Raises ValueError."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            # From now on another program that wants the address is told so.
            listening.listen(_MOST_CONNECTIONS)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "there is no such host"
        raise ValueError(f"--serve {shown}: {reason}; choose another address or port") from None
    return listening


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http="h11",
        ws="none",
        lifespan="off",
        # What it would log may have been sent by users.
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_GOODBYE_SECONDS,
    )


def _say(text: str) -> None:
    print(f"swarm-generate: {text}", file=sys.stderr, flush=True)
