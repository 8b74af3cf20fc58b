"""Serves content to other processes of the run, by digest: the server side of ContentService.

Training comes first: pieces wait while the peer exchanges, and weights are sent to one peer after the other. Nothing is
checked here, because the process that asks checks it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import NotReady, Overloaded, SwarmError, WrongRun
from swarm.machine.clock import Clock
from swarm.rpc.callers import Quota, bearer_of, caller_of
from swarm.rpc.failures import abort
from swarm.rpc.transfers import Turns, yield_to_exchange
from swarm.rpc.v1 import content_pb2 as pb
from swarm.rpc.v1.content_pb2_grpc import ContentServiceServicer
from swarm.rpc.wire import CHUNK_BYTES

logger = logging.getLogger(__name__)

Shelf = Callable[[str], bytes | None]
"""Returns the content with a given SHA-256 digest in hexadecimal; None if it is not here. Blocks. Raises SwarmError,
ValueError or OSError if it cannot be read."""

MOST_CALLS = 16
"""The most calls that are served at one time. Each holds a segment of a tensor, or a tokenizer's file, in memory."""
MOST_CALLS_OF_ONE = 4
"""The most of these calls that one caller may have."""
RETRY_SECONDS = 0.5


def nothing(sha256: str) -> bytes | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Shelves:
    """The content that one peer serves."""

    weights: Shelf = nothing
    tokenizer: Shelf = nothing


@dataclass(eq=False)
class ContentServicer(ContentServiceServicer):
    run_id: str
    shelves: Shelves
    is_exchanging: Callable[[], bool]
    clock: Clock
    turns: Turns
    """Decide which peer may fetch weights now."""
    _calls: Quota = field(
        default_factory=lambda: Quota("calls", MOST_CALLS, each=MOST_CALLS_OF_ONE, retry_seconds=RETRY_SECONDS),
        init=False,
    )

    async def Weights(self, request: pb.ContentRequest, context: Any) -> AsyncIterator[pb.ContentPiece]:
        try:
            async with (
                self.turns.turn(request.peer_id or caller_of(context), bearer_of(context)),
                aclosing(self._serve(self.shelves.weights, request, context)) as pieces,
            ):
                async for piece in pieces:
                    yield piece
        except Overloaded as error:
            await abort(context, error)

    async def Tokenizer(self, request: pb.ContentRequest, context: Any) -> AsyncIterator[pb.ContentPiece]:
        async with aclosing(self._serve(self.shelves.tokenizer, request, context)) as pieces:
            async for piece in pieces:
                yield piece

    async def _serve(
        self, shelf: Shelf, request: pb.ContentRequest, context: Any
    ) -> AsyncGenerator[pb.ContentPiece, None]:
        try:
            with self._calls.taken(caller_of(context)):
                content = memoryview(await self._read(shelf, request))
                for start in range(0, len(content), CHUNK_BYTES):
                    await yield_to_exchange(self.is_exchanging, self.clock)
                    yield pb.ContentPiece(data=bytes(content[start : start + CHUNK_BYTES]))
        except SwarmError as error:
            await abort(context, error)

    async def _read(self, shelf: Shelf, request: pb.ContentRequest) -> bytes:
        if request.run_id != self.run_id:
            raise WrongRun(f"run {request.run_id[:80]!r} is not {self.run_id!r}, which this peer serves")
        try:
            content = await asyncio.to_thread(shelf, request.sha256.hex())
        except (SwarmError, ValueError, OSError) as error:
            logger.warning("not given to another peer: %s", error)
            raise NotReady("it cannot be read here") from None
        if content is None:
            raise NotReady("it is not here")
        return content
