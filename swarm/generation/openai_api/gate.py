"""The gate between the web server and app.py: checks and limits requests, and ends them when their client goes away.

If a client hangs up, or does not read what it is sent, the work for it is cancelled.
"""

import asyncio
import contextlib
import hmac
import logging
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.errors import Overloaded, SwarmError
from swarm.generation.openai_api.answers import Refusal
from swarm.machine.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

HEALTH = "/health"
"""The one path that needs no token: whoever watches the server learns there that it runs, and nothing else."""
MOST_BODY_BYTES = 4 << 20
"""The largest body of a request."""
_READ_SECONDS = 30.0
"""How long a request's body may take to arrive."""
_SEND_SECONDS = 30.0
"""How long a message may take to be sent: a client may read nothing."""
_DRAINED_BODIES = 4
"""Of a body that is too large, this many times MOST_BODY_BYTES are still read, because many clients read no answer
while they send."""
_RETRY_SECONDS = 2


@dataclass(eq=False)
class Gate:
    """Passes on requests that have the token, up to a number at once, with bodies up to a size."""

    app: ASGIApp
    token: str | None
    """The token that requests must have; None accepts all requests."""
    most_requests: int
    """The most POST requests at once, counting those that are being read, wait, or are being answered."""
    _num_requests: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def answer(message: Message) -> None:
            async with asyncio.timeout(_SEND_SECONDS):
                await send(message)

        try:
            if scope["path"] != HEALTH:
                self._require_token(scope)
            if scope["method"] != "POST":
                await self.app(scope, receive, answer)
                return
            if self._num_requests >= self.most_requests:
                raise Refusal(
                    429, "too many requests at once", code="rate_limit_exceeded", retry_seconds=_RETRY_SECONDS
                )
            self._num_requests += 1
            try:
                await _answer(self.app, scope, await _body(scope, receive), receive, answer)
            finally:
                self._num_requests -= 1
        except Refusal as refusal:
            await refusal.response()(scope, receive, answer)
        except (TimeoutError, ConnectionError):
            # The client does not read, or has gone: nothing can be sent to it.
            pass

    def _require_token(self, scope: Scope) -> None:
        if self.token is None:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self.token.encode()):
            raise Refusal(401, "the token is missing or wrong: send it as a bearer token", code="invalid_api_key")


async def _body(scope: Scope, receive: Receive) -> bytes:
    """All of a request's body. Raises Refusal."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        # This also keeps web pages out, because browsers do not let a page send JSON to another site without asking
        # that site.
        raise Refusal(415, "the body must be JSON, and be sent with Content-Type: application/json")
    body, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(_READ_SECONDS):
            while (message := await receive())["type"] == "http.request":
                piece = message.get("body", b"")
                num_bytes += len(piece)
                if num_bytes <= MOST_BODY_BYTES:
                    body += piece
                if not message.get("more_body", False) or num_bytes > _DRAINED_BODIES * MOST_BODY_BYTES:
                    break
            else:
                raise ConnectionResetError
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {_READ_SECONDS:.0f} seconds") from None
    if num_bytes > MOST_BODY_BYTES:
        raise Refusal(413, f"the body is larger than {MOST_BODY_BYTES >> 20} MiB")
    return bytes(body)


async def _answer(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Let the app answer, and stop it if the client hangs up."""
    pending = [body]
    never = asyncio.Event()

    async def replay() -> Message:
        if not pending:
            await never.wait()
        return {"type": "http.request", "body": pending.pop(), "more_body": False}

    async def answer() -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            await app(scope, replay, send)

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(answer())
        watching = tasks.create_task(hung_up())
        await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        watching.cancel()


def refusal_of(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Overloaded):
        seconds = max(1, round(error.retry_after_seconds))
        return Refusal(429, str(error), code="rate_limit_exceeded", retry_seconds=seconds)
    if isinstance(error, SwarmError):
        return Refusal(503, str(error), retry_seconds=_RETRY_SECONDS)
    if isinstance(error, ValueError):
        return Refusal(400, str(error))
    if is_out_of_memory(error):
        return Refusal(503, "there is no memory for this now", retry_seconds=_RETRY_SECONDS)
    # The message is not logged, because it may quote what the user wrote.
    logger.error("a request failed: %s", type(error).__name__)
    logger.debug("where it went wrong:", exc_info=error)
    return Refusal(500, "the server made a mistake")
