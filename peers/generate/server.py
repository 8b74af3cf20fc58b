"""--serve: serves the model over HTTP, until Ctrl-C or SIGTERM."""

import random
from collections.abc import Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from peers.generate.options import GenerateOptions
from peers.generate.terminal import tell, tell_of_cut
from peers.shared import stopping
from peers.shared.web import LOCAL_NAMES, Listener, find_secret
from swarm.generation.openai_api.app import Api
from swarm.generation.openai_api.gate import Gate
from swarm.generation.text_model import TextModel
from swarm.machine.clock import SystemClock

TOKEN_VARIABLE = "SWARM_SERVE_TOKEN"
MOST_WAITING = 64
"""The most requests that wait while others are answered; further ones are told to try again later."""


class Server:
    def __init__(self, options: GenerateOptions, environment: Mapping[str, str]) -> None:
        """Take the address. Raises ValueError if the address cannot be taken, or the token is malformed, and OSError if
        the file with the token cannot be read."""
        self._options = options
        self._most_requests = options.max_sequences + MOST_WAITING
        self._token = find_secret(options.serve_token, environment, option="--serve-token", variable=TOKEN_VARIABLE)
        self._origins = options.serve_origin
        if "*" in self._origins and self._token is None:
            raise ValueError("--serve-origin * lets every web page use the model: it needs --serve-token @FILE")
        self._listener = Listener(*options.address, option="--serve")
        self._url = f"{self._listener.url}/v1"

    async def serve(self, model: TextModel) -> None:
        """Answer requests until Ctrl-C or SIGTERM. Answers under way then have a few seconds."""
        stop = stopping.stop_event()
        if not self._listener.is_local and self._token is None:
            tell(f"warning: everybody who reaches {self._url} can use the model: lock it with --serve-token @FILE")
        if model.template is not None:
            try:
                await model.conversation([{"role": "user", "content": "Hello"}])
            except ValueError as error:
                tell(f"warning: conversations will be refused: {error}")
        tell_of_cut(self._options, model.engine.longest, model.engine.longest)
        tell(f"serves {model.name} at {self._url}")
        await self._listener.serve(self.app(model), stop)

    def close(self) -> None:
        self._listener.close()

    def app(self, model: TextModel) -> ASGIApp:
        numbers = random.SystemRandom()
        api = Api(model, default_tokens=self._options.most_tokens, clock=SystemClock(), numbers=numbers)
        gate: ASGIApp = Gate(api.app(), token=self._token, most_requests=self._most_requests)
        if self._origins:
            # It stands before the gate: a browser asks first without a token whether the page may send its request.
            allowed = ["Authorization", "Content-Type"]
            gate = CORSMiddleware(gate, self._origins, allow_methods=["GET", "POST"], allow_headers=allowed)
        if self._token is None and self._listener.is_local:
            # A web page could have its own name resolve to this machine (DNS rebinding), and so reach the model.
            return TrustedHostMiddleware(gate, allowed_hosts=LOCAL_NAMES)
        return gate
