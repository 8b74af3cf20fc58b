"""The gRPC face of generation at one stage: GenerationService.

It checks each caller's request, finds a place and a round's weights for each session, and frees both when the call ends
in any way.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

from swarm.errors import MalformedMessage, NotReady
from swarm.generation.choice import NO_SCORING, Scorer
from swarm.hop.session import Order, unpack_order
from swarm.rpc.callers import RETRY_SECONDS, Caller, Quota, caller_of
from swarm.rpc.serving import check_address
from swarm.rpc.v1 import generation_pb2 as pb
from swarm.rpc.v1 import stage_pb2
from swarm.rpc.v1.generation_pb2_grpc import GenerationServiceServicer
from swarm.stage.boundary import boundary_of
from swarm.stage.decoder import Computed, Decoder, session_bytes
from swarm.stage.held_rounds import ROUND_SECONDS
from swarm.stage.incoming import FIRST_SECONDS, Context
from swarm.stage.refusal import refuse
from swarm.stage.session import Session, SessionCaller
from swarm.stage.stage import Stage

NEVER_SECONDS = 10.0
"""How long a caller waits before it asks a peer again that takes no sessions."""


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """The most that sessions may use of a peer. One caller gets at most half of each limit, or one session."""

    max_sessions: int = 64
    """Sessions at once, including those for which the peer only stands by; with 0 it takes none."""
    max_bytes: int = 1 << 30
    """The bytes for the texts' keys and values, and for the hidden states that are kept of them. They are counted when
    a session begins, for all positions that it may get, so that no session ends for lack of memory."""
    max_seconds: float = 600.0
    """A longer session has to begin again, at this peer or another one."""


class GenerationServicer(GenerationServiceServicer):
    """Serves one stage's sessions."""

    def __init__(self, stage: Stage, limits: SessionLimits) -> None:
        self._stage = stage
        self._config = stage.context.config
        self._hop = stage.context.hop
        self._decoder = Decoder(stage.context.backend, stage.context.runtime, most_bytes=limits.max_bytes)
        self._boundary = boundary_of(self._config)
        self._limits = limits
        retry_seconds = RETRY_SECONDS if limits.max_sessions else NEVER_SECONDS
        self._sessions = Quota("sessions", limits.max_sessions, retry_seconds=retry_seconds)
        self._bytes = Quota("bytes of sessions", limits.max_bytes)
        self._num_tokens = 0

    def counters(self) -> stage_pb2.GenerationCounters:
        """The numbers of sessions and held rounds now, and of tokens since the peer started."""
        return stage_pb2.GenerationCounters(
            sessions=int(self._sessions.total), tokens=self._num_tokens, rounds=len(self._stage.held_rounds)
        )

    # The generated type knows only iterators, but grpc also takes a coroutine that uses the context to read and write.
    async def Generate(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        caller = SessionCaller(context)
        try:
            message = await caller.read(FIRST_SECONDS)
            if message is None or not message.HasField("open"):
                raise MalformedMessage("a session begins with its open message")
            async with asyncio.timeout(self._limits.max_seconds):
                await self._serve(message.open, caller, caller_of(context))
        except TimeoutError:
            seconds = self._limits.max_seconds
            await refuse(context, NotReady(f"a session lasts {seconds:.0f} s here, and may begin again"))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this call and nothing else
            await refuse(context, error)

    async def _serve(self, opening: pb.SessionOpen, caller: SessionCaller, name: Caller) -> None:
        stage = self._stage.number
        check_address(opening.address, run_id=self._config.run_id, stage=stage)
        order = self._order(opening)
        if not self._stage.admission.is_open:
            raise NotReady("this peer is joining or leaving")
        with ExitStack() as stack:
            stack.enter_context(self._sessions.taken(name))
            stack.enter_context(self._bytes.taken(name, session_bytes(self._config, stage, order)))
            held = stack.enter_context(self._stage.held_rounds.held(await self._round(opening, name), name))
            later = None
            if self._hop is not None:
                later = self._hop.continuation(order, rounds=tuple(opening.rounds[1:]), newest_round=held.number)
            computed = Computed(order, held, self._decoder.cache(order), Scorer(order.scoring or NO_SCORING))
            session = Session(
                caller, computed, self._decoder, boundary=self._boundary, is_first=stage == 0, continuation=later,
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
        await self._stage.present_round.wait_for(number, ROUND_SECONDS, None)
        return number

    def _count_token(self) -> None:
        self._num_tokens += 1
