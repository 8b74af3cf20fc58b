"""The hop: hands one microbatch to the next stage, and to another peer there when that fails.

This is the only place that retries. A microbatch keeps its id through every retry, so that a peer that knows it never
counts it twice. The peers that worked on it before are asked first.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Never, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from swarm.errors import MalformedMessage, PathStandsStill, PeerUnavailable, TryAnotherPeer, TryLater
from swarm.events import Events
from swarm.events import Hop as HopEvent
from swarm.hop.answers import HopListener, HopReply, Obstacle, Tensors
from swarm.hop.calls import Calls, EncodingsIn, Hold
from swarm.hop.continuation import Continuation
from swarm.hop.retries import HopContext, Retries
from swarm.hop.session import Order
from swarm.hop.spot_checks import SpotChecks
from swarm.machine.words import Repeats
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import NewBytes, new_bytes, stage_stub
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId, PeerRecord

logger = logging.getLogger(__name__)

HOLD_SECONDS = 2.0
"""How long peers are asked again while they hold too many rounds."""

_Answer = TypeVar("_Answer")
GAP_SECONDS = 0.5
PATIENCE_SECONDS = 10.0
"""How long a probe waits for a connection and an answer. A peer that comes back in this time is found at once."""


class Hop:
    """Hands microbatches to the peers of one block."""

    def __init__(
        self, context: HopContext, *, events: Events | None = None, memory: NewBytes = new_bytes,
        check_share: float = 0.0, drifts: bool = False, encodings_in: EncodingsIn = lambda _: {},
    ) -> None:  # fmt: skip
        """
        Args:
            memory: makes the memory of the tensors that the stage answers.
            check_share: the share of answers that other peers check, while `run` runs.
            drifts: whether peers of the block have other weights within a round (DiLoCo).
            encodings_in: left out, only samples are sent.
        """
        self.block = context.block
        self._context = context
        self._router, self._clock = context.router, context.clock
        self._events = events or Events()
        self._repeats = Repeats(context.clock)
        self._under_way: set[Retries] = set()
        self._empty_since: float | None = None
        """Since when the block has had no peers but banned ones, and none has answered."""
        self._calls = Calls(
            context, memory=memory, encodings_in=encodings_in, wants_statements=check_share > 0.0 and not drifts
        )
        self.checks = SpotChecks(
            run_id=context.run_id, block=context.block, share=check_share, router=context.router, drifts=drifts,
            encodings_in=encodings_in, stub=lambda record: stage_stub(context.channels.channel(record)),
        )  # fmt: skip

    async def run(self) -> None:
        """Have answers checked, and watch the connections to the peers, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.checks.run())
            tasks.create_task(watch_connections(self._context))

    @property
    def is_held_up(self) -> bool:
        """Whether microbatches here wait for the line or for room at the next stage, so that one more would too."""
        return self._calls.is_sending or any(retries.is_refused for retries in self._under_way)

    @property
    def line_bytes_per_second(self) -> float:
        """How fast tensors of microbatches arrive at the stage, all together; 0 before any have arrived."""
        return self._calls.line.bytes_per_second

    @property
    def obstacle(self) -> Obstacle | None:
        """Why no peer of the stage takes the microbatches under way here; None if one does or will in a moment."""
        obstacles = (retries.candidates.obstacle() for retries in self._under_way)
        return next((each for each in obstacles if each is not None), None)

    async def train(
        self, microbatch: Microbatch, tensors: Tensors, listener: HopListener, hints: Mapping[Block, PeerId]
    ) -> HopReply:
        """Let the stage, and all stages after it, compute one microbatch. The `hints` are peers that worked on it
        before, by block.

        Raises Fatal if a peer refused the request itself, or too many peers failed. Cancellation closes the stream,
        which makes the peer roll back.
        """
        retries = Retries(self._context, self._repeats, hints)

        async def once(record: PeerRecord) -> HopReply:
            self._events.write(
                HopEvent(
                    microbatch=microbatch.index, round=microbatch.round, stage=self.block.stage, peer=record.peer_id,
                    attempt=retries.num_failures + retries.num_busy + retries.num_sent_on + 1,
                )
            )  # fmt: skip
            return await self._calls.train(record, microbatch, tensors, listener, retries)

        reply = await self._until_answered(once, microbatch.num_samples, listener, retries)
        if self.checks.share:
            reply.on_ack = partial(self.checks.acknowledged, microbatch, tensors)
        return reply

    async def hold(self, newest_round: int, listener: HopListener, *, path: int = 0) -> Hold:
        """Ask a peer of the stage, and one of each later stage on a path, to keep a round's weights until the hold is
        closed. With DiLoCo a stage holds this round or the newest one before it.

        Raises RoundGone if no peer of a stage has that round's weights any more, Overloaded if peers hold as many other
        rounds as they can, and what `train` does. Cancellation ends the hold at all of these peers.
        """
        return await self._until_answered(
            lambda record: self._calls.hold(record, newest_round, listener, path=path),
            1,
            listener,
            Retries(self._context, self._repeats),
            busy_seconds=HOLD_SECONDS,
        )

    async def evaluate(
        self, tensors: Tensors, held: Sequence[pb.HeldRound], listener: HopListener, *, path: int = 0
    ) -> float:
        """Compute the mean loss in nats per target, by a forward along a path with the weights with which a round
        began.

        `tokens` are (B, T + 1), the last column being only a target. `held` says for this and all later stages which
        round peers hold for this caller, and which peers, which are asked first. Raises RoundGone if no peer of a stage
        has its round's weights any more, and what `train` does. Cancellation closes the stream.
        """
        return await self._until_answered(
            lambda record: self._calls.evaluate(record, tensors, held, listener, path=path),
            tensors["tokens"].shape[0],
            listener,
            Retries(self._context, self._repeats, hints={self.block: PeerId(held[0].peer_id)}),
        )

    def continuation(
        self, order: Order, *, rounds: tuple[int, ...] = (), newest_round: int | None = None, piece_bytes: int = 0
    ) -> Continuation:
        """The continuation of a session at this stage and all after it; see open_session."""
        return Continuation(order, self._context, rounds=rounds, newest_round=newest_round, piece_bytes=piece_bytes)

    async def _until_answered(
        self,
        once: Callable[[PeerRecord], Awaitable[_Answer]],
        num_samples: int,
        listener: HopListener,
        retries: Retries,
        busy_seconds: float = math.inf,
    ) -> _Answer:
        """Ask peer after peer with `once` until one answers. If peers say for longer than `busy_seconds` that they have
        no room, raise that error."""
        num_cancels, since = _num_cancels(), self._clock.monotonic()
        self._under_way.add(retries)
        try:
            while True:
                if _num_cancels() > num_cancels:
                    # If a cancellation comes as a connection breaks, gRPC may raise the connection's error instead.
                    raise asyncio.CancelledError
                record = retries.choose(num_samples)
                if record is None:
                    self._require_peers()
                    listener.progress(self.block.stage, obstacle=retries.candidates.obstacle())
                    await self._clock.sleep(retries.candidates.wait_seconds())
                    continue
                try:
                    answer = await once(record)
                    self._empty_since = None
                    return answer
                except (TryAnotherPeer, TryLater, MalformedMessage) as error:
                    if isinstance(error, TryLater) and self._clock.monotonic() > since + busy_seconds:
                        raise
                    retries.note(record, error)
        finally:
            self._under_way.remove(retries)

    def _require_peers(self) -> None:
        """Raise PathStandsStill if the block has had no peers for longer than a microbatch waits for one."""
        now = self._clock.monotonic()
        if len(self._router.banned(self.block)) < self._router.num_peers(self.block):
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        elif now - self._empty_since >= self._context.limits.empty_seconds:
            raise PathStandsStill(f"no peer of stage {self.block} answers")


def _num_cancels() -> int:
    """How many cancellations of this task are pending. A task group that failed earlier may have left one behind."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def watch_connections(context: HopContext) -> Never:
    """Tell the router which peers' connections break, and which unreachable peers serve again or still do not.

    Runs until it is cancelled. Each peer that the router takes for unreachable gets one call at a time, of gRPC's own
    health check, which a peer answers once it serves.
    """
    block, router, channels = context.block, context.router, context.channels
    connected: set[str] = set()
    under_way: set[str] = set()

    async def probe(record: PeerRecord) -> None:
        try:
            health: Any = HealthStub(channels.channel(record))
            reply = await health.Check(HealthCheckRequest(), timeout=PATIENCE_SECONDS, wait_for_ready=True)
        except (grpc.aio.AioRpcError, PeerUnavailable) as error:
            logger.debug("%s is still out of reach: %s", record.name, error)
        else:
            if reply.status == HealthCheckResponse.SERVING:
                router.answered(block, PeerId(record.peer_id))
        finally:
            under_way.discard(record.place)

    async with asyncio.TaskGroup() as tasks:
        while True:
            records = router.records(block)
            connected, previously = {r.place for r in records if channels.is_connected(r)}, connected
            broken = previously - connected
            for record in records:
                if record.place in broken:
                    # Counted as a failure now, whichever call noticed the break, because a hop would wait for the next
                    # connection.
                    router.failed(block, PeerId(record.peer_id), is_unreachable=True, reason="its connection broke")
            for record in router.unreachable(block):
                if record.peer_id == router.own:
                    # This process stood still, and goes on. It need not reach its own address, and often cannot.
                    router.answered(block, router.own)
                elif record.place in under_way:
                    # The peer stays banned until this probe has ended and the next check has come.
                    router.unanswered(block, PeerId(record.peer_id), 4 * GAP_SECONDS)
                else:
                    under_way.add(record.place)
                    tasks.create_task(probe(record))
            await context.clock.sleep(GAP_SECONDS)
