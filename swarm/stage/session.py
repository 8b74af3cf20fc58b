"""One session at one stage: positions come in, are computed and sent on, and tokens pass through on their way back.

Run by stage/generation for each call. At stage 0 the prompt comes from the caller. Every further position is the token
that passes through, so it need not go to the caller and back. Keeps no text beyond the session, and never logs any.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import MalformedMessage
from swarm.hop.continuation import Continuation
from swarm.hop.session import PIECE_TOKENS, Piece, Token, pack_token, unpack_pieces
from swarm.rpc.serving import MESSAGE_SECONDS, receive, send
from swarm.rpc.v1 import generation_pb2 as pb
from swarm.stage.boundary import Boundary
from swarm.stage.decoder import Computed, Decoder
from swarm.stage.incoming import Context

BEAT_SECONDS = 3.0
"""Time between two signs of life to the caller, which would take a silent peer for dead."""

Positions = tuple[Sequence[Piece], bool]
"""The next positions, and whether the token after them is wanted."""


class SessionCaller:
    """The stream to the process that asked for a session: reads and checks its messages, and sends replies."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._writing = asyncio.Lock()

    async def read(self, seconds: float = MESSAGE_SECONDS) -> pb.GenerateRequest | None:
        """The next message; None at the end of the stream. Raises DeadlineExceeded, MalformedMessage."""
        message = await receive(self._context, seconds)
        if not isinstance(message, pb.GenerateRequest | None):
            raise MalformedMessage("that is no message of a session")
        return message

    async def say(self, reply: pb.GenerateReply) -> None:
        """Send a reply. Raises DeadlineExceeded if the process does not take it."""
        async with self._writing:
            await send(self._context, reply)


@dataclass(eq=False)
class Session:
    """One session at one stage."""

    caller: SessionCaller
    computed: Computed
    decoder: Decoder
    boundary: Boundary
    is_first: bool
    continuation: Continuation | None
    """The later stages; None at the last one."""
    on_token: Callable[[], None]
    """Called for each token that passes through."""
    _num_positions: int = field(default=0, init=False)
    """The number of positions that have come in."""
    _prompt_is_whole: bool = field(default=False, init=False)
    _own: asyncio.Queue[Positions] = field(default_factory=lambda: asyncio.Queue(maxsize=1), init=False)
    """At stage 0: the token that has passed through, as the next position."""
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self, *, standby: bool) -> None:
        """Compute until the last token has passed through, or the caller ends the session. Cancellation frees
        everything at once.

        Args:
            standby: whether another peer computes the session for now. This one begins when positions come to it.

        Raises:
            SwarmError: of the caller, or of later stages.
        """
        first: Positions | None = None
        if standby:
            await self._say_opened()
            if (first := await self._from_caller()) is None:
                return
        try:
            async with asyncio.TaskGroup() as tasks:
                works: list[Coroutine[Any, Any, None]] = [self._beat()]
                if self.continuation is not None:
                    works.append(self.continuation.run(self._pass_on))
                running = [tasks.create_task(work) for work in works]
                if self.continuation is not None:
                    await self.continuation.begun.wait()
                if not standby:
                    await self._say_opened()
                running.append(tasks.create_task(self._compute(first)))
                await self._ended.wait()
                for task in running:
                    task.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _say_opened(self) -> None:
        later = () if self.continuation is None else self.continuation.rounds
        await self.caller.say(pb.GenerateReply(opened=pb.SessionOpened(rounds=[self.computed.held.number, *later])))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self.caller.say(pb.GenerateReply())

    # -- positions -----------------------------------------------------------------------------------------------------

    async def _compute(self, first: Positions | None) -> None:
        while (positions := first or await self._next()) is not None:
            first = None
            pieces, sample = positions
            computed = await self.decoder.compute(self.computed, pieces, sample=sample)
            if isinstance(computed, Token):
                await self._pass_on(computed)
            elif computed is not None and self.continuation is not None:
                await self.continuation.push(computed, sample=sample)
        self._ended.set()

    async def _next(self) -> Positions | None:
        return await (self._own.get() if self._prompt_is_whole else self._from_caller())

    async def _from_caller(self) -> Positions | None:
        while (message := await self.caller.read()) is not None:
            if message.pieces:
                pieces = unpack_pieces(message.pieces)
                self._check(pieces)
                self._prompt_is_whole = self.is_first and message.sample
                return pieces, message.sample
        return None

    def _check(self, pieces: Sequence[Piece]) -> None:
        order = self.computed.order
        num_tokens = sum(len(piece.tokens) for piece in pieces)
        self._num_positions += num_tokens
        if num_tokens > PIECE_TOKENS or self._num_positions > order.num_positions:
            raise MalformedMessage(f"{num_tokens} positions are too many for one message, or for the session")
        for piece in pieces:
            length = len(piece.tokens)
            num_bytes = 0 if self.is_first else self.boundary.spec(1, length).num_bytes
            if not length or max(piece.tokens) >= order.vocab_size or len(piece.hidden) != num_bytes:
                raise MalformedMessage("a piece has no tokens, unknown ones, or hidden states of another size")

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def _pass_on(self, token: Token) -> None:
        is_last = token.position + 1 >= self.computed.order.num_positions
        if self.is_first and not is_last:
            # Computed while the token is on its way to the caller.
            self._own.put_nowait(([Piece((token.token,))], True))
        self.on_token()
        await self.caller.say(pb.GenerateReply(sampled=pack_token(token)))
        if is_last:
            self._ended.set()
