"""Content, asked for by its digest: both ends of ContentService.

Training comes first at the server: pieces wait while the peer exchanges, and weights are sent to one peer after the
other. It checks nothing. The process that asks checks every answer: what one peer fails to send, another is asked for,
and one that sent wrong bytes no more.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from swarm.errors import IntegrityError, MalformedMessage, NotReady, PeerUnavailable, SwarmError, WrongRun
from swarm.machine.clock import Clock
from swarm.machine.words import Repeats, counted
from swarm.rpc.ask import download
from swarm.rpc.callers import Quota, caller_of, token_or_address_of
from swarm.rpc.channels import ChannelPool
from swarm.rpc.failures import answers_errors
from swarm.rpc.transfers import MAX_SOURCES, Arriving, Segments, Turns, yield_to_exchange
from swarm.rpc.v1 import content_pb2 as pb
from swarm.rpc.v1.content_pb2_grpc import ContentServiceServicer, ContentServiceStub
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

Shelf = Callable[[str], bytes | None]
"""Returns the content with a given SHA-256 digest in hexadecimal; None if it is not here. Blocks. Raises SwarmError,
ValueError or OSError if it cannot be read."""

MOST_CALLS = 16
"""The most calls that are served at one time. Each holds a segment of a tensor, or a tokenizer's file, in memory."""
MOST_CALLS_OF_ONE = 4
"""The most of these calls that one caller may have."""
PIECE_BYTES = 1 << 20
RETRY_SECONDS = 0.5
SILENCE_SECONDS = 20.0
"""Longest wait for a peer's next piece: four times as long as the peer holds a piece back for an exchange."""


def nothing(sha256: str) -> bytes | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Shelves:
    weights: Shelf = nothing
    tokenizer: Shelf = nothing


@answers_errors
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
        async with (
            self.turns.turn(request.peer_id or caller_of(context), token_or_address_of(context)),
            aclosing(self._serve(self.shelves.weights, request, context)) as pieces,
        ):
            async for piece in pieces:
                yield piece

    async def Tokenizer(self, request: pb.ContentRequest, context: Any) -> AsyncIterator[pb.ContentPiece]:
        async with aclosing(self._serve(self.shelves.tokenizer, request, context)) as pieces:
            async for piece in pieces:
                yield piece

    async def _serve(
        self, shelf: Shelf, request: pb.ContentRequest, context: Any
    ) -> AsyncGenerator[pb.ContentPiece, None]:
        with self._calls.taken(caller_of(context)):
            content = memoryview(await self._read(shelf, request))
            for start in range(0, len(content), PIECE_BYTES):
                await yield_to_exchange(self.is_exchanging, self.clock)
                yield pb.ContentPiece(data=bytes(content[start : start + PIECE_BYTES]))

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


class Kind(StrEnum):
    WEIGHTS = "Weights"
    TOKENIZER = "Tokenizer"


class Line:
    """Makes calls to other peers, on the connections for bulk transfers."""

    def __init__(self, run_id: str, channels: ChannelPool, *, own_id: str) -> None:
        self._run_id = run_id
        self._own_id = own_id
        self._channels = channels

    async def ask(self, peer: PeerRecord, kind: Kind, sha256: str, *, max_bytes: int) -> bytes:
        """Get the content that has this digest. Raises NotReady if the peer does not have it, Overloaded if it serves
        others first, IntegrityError or MalformedMessage if it sends something else, PeerUnavailable or DeadlineExceeded
        if it is gone or silent."""
        stub = ContentServiceStub(self._channels.channel(peer, bulk=True))
        request = pb.ContentRequest(run_id=self._run_id, sha256=bytes.fromhex(sha256), peer_id=self._own_id)
        call: Any = getattr(stub, kind.value)(request)
        content = bytearray()
        async with aclosing(download(call, peer.peer_id, silence_seconds=SILENCE_SECONDS)) as pieces:
            async for piece in pieces:
                if not 0 < len(piece.data) <= max_bytes - len(content):
                    raise MalformedMessage(f"{peer.peer_id} sends more than {max_bytes} bytes, or nothing")
                content += piece.data
        # In a thread, because it takes milliseconds.
        if (await asyncio.to_thread(hashlib.sha256, content)).hexdigest() != sha256:
            raise IntegrityError(f"what {peer.peer_id} sent does not match its digest")
        return bytes(content)


@dataclass(frozen=True, kw_only=True)
class Piece:
    sha256: str
    max_bytes: int
    keep: Callable[[bytes], object]
    """Called with the bytes once they have come and are checked."""


class Fetcher:
    """One process's downloads of one kind of content. It remembers which peers sent something, and which sent wrong
    bytes."""

    def __init__(
        self, line: Line, kind: Kind, donors: Callable[[], Sequence[PeerRecord]], clock: Clock, rng: random.Random
    ) -> None:
        """`donors` gives the peers that may be asked now. `rng` orders the peers; each process has its own, so that
        not all ask the same peer first."""
        self._line = line
        self._kind = kind
        self._donors = donors
        self._clock = clock
        self._rng = rng
        self._failures = Repeats(clock)
        self._distrusted: set[str] = set()
        self._proven: list[str] = []
        """Peers that have sent something. They are asked first."""

    async def fetch(self, pieces: Sequence[Piece], arriving: Arriving | None = None) -> None:
        """Fetch all pieces, in any order. After a failure or cancellation, the pieces that came have been passed to
        `keep`. `arriving` is notified of each piece that has come. Raises PeerUnavailable if there is a piece that no
        peer sends.
        """
        missing, donors = Segments(range(len(pieces))), self._ranked()
        async with asyncio.TaskGroup() as workers:
            for _ in range(MAX_SOURCES):
                workers.create_task(self._work(donors, pieces, missing, arriving))
        if missing.num_missing:
            of = counted(len(pieces), "piece")
            raise PeerUnavailable(f"no peer that answers has it: {missing.num_missing} of {of} missing")

    async def _work(
        self, donors: Iterator[PeerRecord], pieces: Sequence[Piece], missing: Segments, arriving: Arriving | None
    ) -> None:
        """Fetch from one donor until it fails, then from the next one."""
        for donor in donors:
            name = donor.display_name

            async def fetch(index: int, donor: PeerRecord = donor, name: str = name) -> None:
                piece = pieces[index]
                content = await self._line.ask(donor, self._kind, piece.sha256, max_bytes=piece.max_bytes)
                piece.keep(content)
                if arriving is not None:
                    arriving.add(len(content), name)
                if donor.peer_id not in self._proven:
                    self._proven.append(donor.peer_id)

            try:
                await missing.fetch_from(name, fetch, self._clock, arriving)
                return
            except NotReady as error:
                logger.debug("%s: %s", donor.peer_id, error)
            except SwarmError as error:
                self._say(donor, error)
                if isinstance(error, IntegrityError | MalformedMessage):
                    self._distrusted.add(donor.peer_id)

    def _say(self, donor: PeerRecord, error: SwarmError) -> None:
        """Log what is wrong with a donor; the same line is not repeated, though the donor is asked at every fetch."""
        if self._failures.count((donor.peer_id, str(error))):
            logger.info("%s is no source: %s", donor.peer_id, error)

    def _ranked(self) -> Iterator[PeerRecord]:
        trusted = [donor for donor in self._donors() if donor.peer_id not in self._distrusted]
        self._rng.shuffle(trusted)
        return iter(sorted(trusted, key=lambda donor: donor.peer_id not in self._proven))
