"""Fetches what digests name from several peers at once, whichever of them have it.

Used by weights.py and tokenizer.py. If one peer fails to send something, another one is asked for it, and nothing that
has come is fetched again. A peer that sent something else is not asked any more.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarm.content.line import Kind, Line
from swarm.errors import IntegrityError, MalformedMessage, NotReady, Overloaded, PeerUnavailable, SwarmError
from swarm.machine.arriving import Arriving
from swarm.machine.clock import Clock
from swarm.machine.repeats import Repeats
from swarm.machine.words import counted
from swarm.rpc.segments import Segments
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

MAX_SOURCES = 4
"""Peers that are asked, and send, at the same time."""
PATIENCE_SECONDS = 3600.0
"""How long a fetch waits for a peer that serves others first."""
LONGEST_RETRY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One thing to fetch.

    Attributes:
        keep: is handed the bytes, once they are here and checked.
    """

    sha256: str
    max_bytes: int
    keep: Callable[[bytes], object]


class Fetcher:
    """One process's downloads of one kind, and what it has learnt about the peers that it asked."""

    def __init__(
        self, line: Line, kind: Kind, donors: Callable[[], Sequence[PeerRecord]], clock: Clock, rng: random.Random
    ) -> None:
        """
        Args:
            donors: gives the peers that may be asked now.
            rng: orders the peers; each process has another one, so that not all processes ask the same peer.
        """
        self._line = line
        self._kind = kind
        self._donors = donors
        self._clock = clock
        self._rng = rng
        self._failures = Repeats(clock)
        self._distrusted: set[str] = set()
        self._proven: list[str] = []
        """Peers that have sent something, and are asked first."""

    async def fetch(self, pieces: Sequence[Piece], arriving: Arriving | None = None) -> None:
        """Fetch all pieces, in any order. If it fails or is cancelled, the pieces that came were handed over already.

        Args:
            arriving: is told of each piece that has come.

        Raises:
            PeerUnavailable: there is a piece that no peer sends.
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
        """Fetch from one donor after another, from each until it fails."""
        for donor in donors:
            given_at = self._clock.monotonic()
            while (index := await missing.take()) is not None:
                piece, pause_seconds = pieces[index], 0.0
                try:
                    content = await self._line.ask(donor, self._kind, piece.sha256, max_bytes=piece.max_bytes)
                    piece.keep(content)
                    given_at = self._clock.monotonic()
                    missing.finish(index)
                    if arriving is not None:
                        arriving.add(len(content), donor.name or donor.peer_id[:8])
                    if donor.peer_id not in self._proven:
                        self._proven.append(donor.peer_id)
                except NotReady as error:
                    logger.debug("%s: %s", donor.peer_id, error)
                    break
                except Overloaded as error:
                    # The donor serves others first. Another donor may send this piece meanwhile.
                    if self._clock.monotonic() - given_at >= PATIENCE_SECONDS:
                        self._say(donor, error)
                        break
                    if arriving is not None:
                        arriving.held_up(donor.name or donor.peer_id[:8], str(error))
                    pause_seconds = min(error.retry_after_seconds, LONGEST_RETRY_SECONDS)
                except SwarmError as error:
                    self._say(donor, error)
                    if isinstance(error, IntegrityError | MalformedMessage):
                        self._distrusted.add(donor.peer_id)
                    break
                finally:
                    missing.give_back(index)
                await self._clock.sleep(pause_seconds)
            else:
                return

    def _say(self, donor: PeerRecord, error: SwarmError) -> None:
        """Log what is wrong with a donor. It is asked again each time that something is to be fetched."""
        if self._failures.count((donor.peer_id, str(error))):
            logger.info("%s is no source: %s", donor.peer_id, error)

    def _ranked(self) -> Iterator[PeerRecord]:
        trusted = [donor for donor in self._donors() if donor.peer_id not in self._distrusted]
        self._rng.shuffle(trusted)
        return iter(sorted(trusted, key=lambda donor: donor.peer_id not in self._proven))
