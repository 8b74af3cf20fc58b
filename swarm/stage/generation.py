"""The gRPC face of generation at one stage: GenerationService, and its sessions.

Positions come in, are computed and sent on, and tokens pass through on their way back. At stage 0 the prompt comes from
the caller. Every further position is the token that passes through, so it need not go to the caller and back. Keeps no
text beyond the session, and never logs any.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import MalformedMessage, NotReady
from swarm.generation.decoding import NO_SCORING, Scorer
from swarm.hop.continuation import Continuation
from swarm.hop.session import PIECE_TOKENS, Order, Piece, Token, pack_token, unpack_order, unpack_pieces
from swarm.rpc.callers import RETRY_SECONDS, Caller, Quota, caller_of
from swarm.rpc.dispatch import FIRST_SECONDS
from swarm.rpc.failures import answers_errors
from swarm.rpc.serving import MESSAGE_SECONDS, Context, check_address, receive, send
from swarm.rpc.v1 import generation_pb2 as pb
from swarm.rpc.v1 import stage_pb2
from swarm.rpc.v1.generation_pb2_grpc import GenerationServiceServicer
from swarm.stage.boundary import Boundary
from swarm.stage.call import SLOWEST_BYTES_PER_SECOND
from swarm.stage.decoder import Computed, Decoder, session_bytes
from swarm.stage.held_rounds import ROUND_SECONDS
from swarm.stage.stage import Stage

BEAT_SECONDS = 3.0
"""Time between two signs of life to the caller, which would take a silent peer for dead."""
NEVER_SECONDS = 10.0
"""How long a caller waits before it asks a peer again that takes no sessions."""

Positions = tuple[Sequence[Piece], bool]
"""The next positions, and whether the token after them is wanted."""


@dataclass(eq=False)
class Session:
    context: Context
    """The stream to the process that asked for the session."""
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
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self, *, standby: bool) -> None:
        """Compute until the last token has passed through, or the caller ends the session. Cancellation frees
        everything at once. `standby` says whether another peer computes the session for now. This one begins when
        positions come to it. Raises the SwarmErrors of the caller, or of later stages."""
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
                    self.computed.next_round = self.continuation.rounds[0]
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
        await self._say(pb.GenerateReply(opened=pb.SessionOpened(rounds=[self.computed.held.number, *later])))

    async def _say(self, reply: pb.GenerateReply) -> None:
        async with self._writing:
            await send(self.context, reply)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._say(pb.GenerateReply())

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
        # A piece of a prompt may fill a slow line for longer than that.
        piece_bytes = 0 if self.is_first else self.boundary.spec(1, PIECE_TOKENS).num_bytes
        seconds = MESSAGE_SECONDS + piece_bytes / SLOWEST_BYTES_PER_SECOND
        while (message := await _read(self.context, seconds)) is not None:
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
            # Computed while the token is on its way to the caller. Later stages that send tokens before this stage has
            # computed the last one have to wait.
            await self._own.put(([Piece((token.token,))], True))
        self.on_token()
        await self._say(pb.GenerateReply(sampled=pack_token(token)))
        if is_last:
            self._ended.set()


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    max_sessions: int = 64
    """Sessions at once, including those for which the peer only stands by; with 0 it takes none."""
    max_bytes: int = 1 << 30
    """The bytes for the texts' keys and values, and for the hidden states that are kept of them. They are counted when
    a session begins, for all positions that it may get, so that no session ends for lack of memory."""
    max_seconds: float = 600.0
    """A longer session has to begin again, at this peer or another one."""


@answers_errors
class GenerationServicer(GenerationServiceServicer):
    """Checks each caller's request, finds a place and a round's weights for each session, and frees both when the call
    ends in any way."""

    def __init__(self, stage: Stage, limits: SessionLimits) -> None:
        self._stage = stage
        self._config = stage.context.config
        self._decoder = Decoder(stage.context.backend, stage.context.runtime, most_bytes=limits.max_bytes)
        self._limits = limits
        retry_seconds = RETRY_SECONDS if limits.max_sessions else NEVER_SECONDS
        self._sessions = Quota("sessions", limits.max_sessions, retry_seconds=retry_seconds)
        self._bytes = Quota("bytes of sessions", limits.max_bytes)
        self._num_tokens = 0

    def warm_up(self) -> None:
        """Compile what texts need, for the compute thread; nothing if this peer takes no sessions."""
        if self._limits.max_sessions:
            self._decoder.warm_up(self._stage.held_rounds.find(self._stage.round))

    def counters(self) -> stage_pb2.GenerationCounters:
        """The numbers of sessions and held rounds now, and of tokens since the peer started."""
        return stage_pb2.GenerationCounters(
            sessions=int(self._sessions.total), tokens=self._num_tokens, rounds=len(self._stage.held_rounds)
        )

    # The generated type knows only iterators, but grpc also takes a coroutine that uses the context to read and write.
    async def Generate(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        try:
            message = await _read(context, FIRST_SECONDS)
            if message is None or not message.HasField("open"):
                raise MalformedMessage("a session begins with its open message")
            async with asyncio.timeout(self._limits.max_seconds):
                await self._serve(message.open, context, caller_of(context))
        except TimeoutError:
            seconds = self._limits.max_seconds
            raise NotReady(f"a session lasts {seconds:.0f} s here, and may begin again") from None

    async def _serve(self, opening: pb.SessionOpen, context: Context, name: Caller) -> None:
        stage = self._stage.number
        check_address(opening.address, run_id=self._config.run_id, block=self._stage.block)
        order, hop = self._order(opening), self._stage.context.hop_on(opening.address.path)
        if not self._stage.admission.is_open:
            raise NotReady("this peer is joining or leaving")
        with ExitStack() as stack:
            stack.enter_context(self._sessions.taken(name))
            stack.enter_context(self._bytes.taken(name, session_bytes(self._config, stage, order)))
            held = stack.enter_context(self._stage.held_rounds.held(await self._round(opening, name), name))
            later, boundary = None, self._stage.context.backend.boundary_in(held.number)
            if hop is not None:
                later = hop.continuation(
                    order, rounds=tuple(opening.rounds[1:]), newest_round=held.number,
                    piece_bytes=boundary.spec(1, min(PIECE_TOKENS, order.num_positions)).num_bytes,
                )  # fmt: skip
            computed = Computed(order, held, self._decoder.cache(order), Scorer(order.scoring or NO_SCORING))
            session = Session(
                context, computed, self._decoder, boundary=boundary, is_first=stage == 0, continuation=later,
                on_token=self._count_token,
            )  # fmt: skip
            await session.run(standby=opening.standby)

    def _order(self, opening: pb.SessionOpen) -> Order:
        config = self._config
        if config.model.custom_class:
            raise MalformedMessage("model.custom_class keeps no keys and values: a run with one generates no text")
        longest = config.model.max_positions or config.data.sequence_length
        if not 1 <= opening.num_positions <= longest:
            raise MalformedMessage(f"a session has 1 to {longest} positions, not {opening.num_positions}")
        if len(opening.rounds) not in (0, config.stages.num_stages - self._stage.number):
            raise MalformedMessage("a session that has begun names the rounds of this and all later stages")
        return unpack_order(opening, vocab_size=config.model.vocab_size)

    async def _round(self, opening: pb.SessionOpen, name: Caller) -> int:
        """Choose the round with the wanted weights, and wait until this peer has begun it. Raises NotReady."""
        present = self._stage.round
        if opening.rounds:
            number = opening.rounds[0]
        elif not opening.HasField("newest_round"):
            number = self._stage.held_rounds.choose(present, name)
        elif self._config.rounds.synchronous:
            number = opening.newest_round
        else:
            number = self._stage.held_rounds.choose(self._stage.held_rounds.nearest(opening.newest_round), name)
        await self._stage.present_round.wait_for(number, ROUND_SECONDS)
        return number

    def _count_token(self) -> None:
        self._num_tokens += 1


async def _read(context: Context, seconds: float) -> pb.GenerateRequest | None:
    """The next message; None at the end of the stream. Raises DeadlineExceeded, MalformedMessage."""
    message = await receive(context, seconds)
    if not isinstance(message, pb.GenerateRequest | None):
        raise MalformedMessage("that is no message of a session")
    return message
