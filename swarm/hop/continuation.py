"""The later stages of one session: they continue its text, whichever peers serve them.

All positions of the session are kept until it ends. If a peer fails, another one gets all of them and computes them
again: tokens follow from round, positions and sampling alone, so the text goes on as if nothing had happened. A second
peer of the stage is asked beforehand to hold the round's weights, which might be gone otherwise.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from swarm.errors import (
    MalformedMessage,
    NotReady,
    PeerUnavailable,
    RoundMismatch,
    SwarmError,
    TryAnotherPeer,
    TryLater,
)
from swarm.hop.retries import HopContext, Retries
from swarm.hop.session import PIECE_BYTES, PIECE_TOKENS, Order, Piece, SessionCall, Token, open_session
from swarm.machine.words import Repeats
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long peers are asked again and again, while none has room or none is there."""
STANDBY_SECONDS = 0.5
BEAT_SECONDS = 10.0
"""Time between two signs of life to peers that wait for positions."""


class Transcript:
    """The positions that one session has handed on."""

    def __init__(self, *, vocab_size: int, writes_itself: bool) -> None:
        """A peer of stage 0 writes itself, from its own tokens; later stages wait for the hidden states of each
        token."""
        self._vocab_size = vocab_size
        self._writes_itself = writes_itself
        self._pieces: list[Piece] = []
        self._num_positions = 0
        self._num_sent = 0
        """How many of the pieces have been sent to the peer that computes now."""
        self._awaits_token = False

    def add(self, piece: Piece, *, sample: bool) -> None:
        """Add the next positions; `sample` says whether the token after them is wanted."""
        self._append(piece)
        self._awaits_token = sample

    def _append(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._num_positions += len(piece.tokens)

    @property
    def is_sent(self) -> bool:
        return self._num_sent == len(self._pieces)

    def next_pieces(self) -> tuple[list[Piece], bool]:
        """Return the next pieces for the present peer, and whether the token after them is wanted. There are as many
        pieces as may be computed together and fit into one message. They count as sent from now on."""
        taken: list[Piece] = []
        num_tokens = num_bytes = 0
        for piece in self._pieces[self._num_sent :]:
            num_tokens += len(piece.tokens)
            num_bytes += len(piece.hidden)
            if taken and (num_tokens > PIECE_TOKENS or num_bytes > PIECE_BYTES):
                break
            taken.append(piece)
        self._num_sent += len(taken)
        return taken, self.is_sent and self._awaits_token

    def begin_again(self) -> None:
        self._num_sent = 0

    def answered(self, token: Token) -> None:
        """Note a token from the present peer. Raises PeerUnavailable if its position is not the next one."""
        expected = self._num_positions if self._awaits_token else None
        if token.position != expected or token.token >= self._vocab_size:
            raise PeerUnavailable(f"token {token.token} for position {token.position}, where {expected} is awaited")
        self._awaits_token = self._writes_itself
        if self._writes_itself:
            # The present peer continues from this token by itself. Another peer would have to be sent it.
            self._append(Piece((token.token,)))
            self._num_sent += 1


OnToken = Callable[[Token], Awaitable[None]]


class Continuation:
    """One session's later stages, and the rounds whose weights these use; none until all have taken the session, unless
    it began elsewhere."""

    def __init__(
        self, order: Order, context: HopContext, *, rounds: tuple[int, ...] = (), newest_round: int | None = None,
        piece_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Its rounds, `newest_round` and `piece_bytes` are those of open_session, for the next stage."""
        self.rounds = rounds
        self.begun = asyncio.Event()
        self._newest_round, self._piece_bytes = newest_round, piece_bytes
        self._order = order
        self._context = context
        self._block, self._clock = context.block, context.clock
        self._repeats = Repeats(context.clock)
        self._transcript = Transcript(vocab_size=order.vocab_size, writes_itself=context.block.stage == 0)
        self._call: SessionCall | None = None
        self._standby: SessionCall | None = None
        self._without: set[PeerId] = set()
        self._sending = asyncio.Lock()

    async def run(self, on_token: OnToken) -> None:
        """Pass tokens to `on_token` until the last one, asking other peers where one fails. Cancellation ends the
        session downstream.

        Raises RoundGone if no peer of a later stage has the round's weights any more, and SwarmError if no peer has
        room, too many failed, or one refused the session itself; or what `on_token` raises.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._keep_standby()), tasks.create_task(self._beat())]
                last = self._order.num_positions - 1
                while (token := await self._next_token()).position < last:
                    await on_token(token)
                await on_token(token)
                for helper in helpers:
                    helper.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for call in (self._call, self._standby):
                if call is not None:
                    call.close()

    async def push(self, piece: Piece, *, sample: bool) -> None:
        """Hand on the next positions. If that fails, `run` notices and asks another peer."""
        self._transcript.add(piece, sample=sample)
        if self._call is not None:
            with suppress(SwarmError):
                await self._flush(self._call)

    async def _flush(self, call: SessionCall) -> None:
        async with self._sending:
            while call is self._call and not self._transcript.is_sent:
                pieces, sample = self._transcript.next_pieces()
                await call.send(pieces, sample=sample)

    # -- the peer that computes ----------------------------------------------------------------------------------------

    async def _next_token(self) -> Token:
        retries = Retries(self._context, self._repeats, without=self._without)
        since = self._clock.monotonic()
        why: SwarmError = NotReady(f"stage {self._block} has no peer that can be asked")
        while True:
            record = await self._choose(retries, since, why) if self._call is None else self._call.peer
            try:
                call = self._call or self._take(await self._open(record, standby=False))
                await self._flush(call)
                token = await call.token()
                self._transcript.answered(token)
                return token
            except (TryAnotherPeer, TryLater, MalformedMessage) as error:
                if self._call is not None:
                    since = self._clock.monotonic()
                self._drop()
                retries.note(record, error)
                why = error

    async def _choose(self, retries: Retries, since: float, why: SwarmError) -> PeerRecord:
        """Wait for the next peer that can be asked. If none comes within PATIENCE_SECONDS of `since`, raise `why`, or
        one of its class."""
        while self._clock.monotonic() <= since + PATIENCE_SECONDS:
            if (record := retries.choose(1)) is not None:
                return record
            await self._clock.sleep(retries.candidates.wait_seconds())
        obstacle = retries.candidates.obstacle()
        if obstacle is None or not isinstance(why, PeerUnavailable):
            raise why
        # What gRPC says of a failed connection names neither the stage nor the peer.
        raise PeerUnavailable(obstacle.in_words(self._block), is_gone=why.is_gone, is_unreachable=why.is_unreachable)

    async def _open(self, record: PeerRecord, *, standby: bool) -> SessionCall:
        return await open_session(
            self._context, record, self._order, rounds=self.rounds, newest_round=self._newest_round, standby=standby,
            piece_bytes=self._piece_bytes,
        )  # fmt: skip

    def _take(self, call: SessionCall) -> SessionCall:
        self._call = call
        self._transcript.begin_again()
        self.rounds = call.rounds
        self.begun.set()
        return call

    def _drop(self) -> None:
        if self._call is not None:
            self._call.close()
        self._call = None
        self._transcript.begin_again()
        if self._standby is not None and self._standby.is_open:
            self._call, self._standby = self._standby, None

    # -- the peer that stands by ---------------------------------------------------------------------------------------

    async def _keep_standby(self) -> None:
        # A second peer is asked at once: where rounds are short, it soon drops this round's weights.
        await self.begun.wait()
        while True:
            if self._standby is not None and not self._standby.is_open:
                self._standby = None
            if self._standby is None and self._call is not None:
                await self._find_standby(self._call.peer_id)
            await self._clock.sleep(STANDBY_SECONDS)

    async def _find_standby(self, present: PeerId) -> None:
        record = self._context.router.choose(self._block, 1, exclude={present, *self._without})
        if record is None:
            return
        try:
            standby = await self._open(record, standby=True)
        except SwarmError as error:
            logger.debug("%s does not stand by for a session: %s", record.name, error)
            if isinstance(error, RoundMismatch):
                self._without.add(PeerId(record.peer_id))
            return
        if self._call is not None and self._call.peer_id == standby.peer_id:
            # Meanwhile this very peer has become the one that computes.
            standby.close()
        else:
            self._standby = standby

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(BEAT_SECONDS)
            for call in (self._call, self._standby):
                if call is not None:
                    with suppress(SwarmError):
                        async with self._sending:
                            await call.send()
