"""The hop: one microbatch handed to the next stage, and re-routed when that fails.

Trainers and stage peers use the same code: a trainer is simply "stage -1". Here is the one place that retries:

    choose a peer (retries) -> one stream to it (calls) -> its answer, or note why there is none (retries), and again

A microbatch keeps its id through every retry, so that a peer that knows it never counts it twice; the peers that worked
on it before are asked first. Never looks into the tensors.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import torch

from swarm.errors import MalformedMessage, RoundMismatch, StaleMicrobatch, TryAnotherPeer, TryLater
from swarm.events.kinds import Events, NoEvents
from swarm.events.kinds import Hop as HopEvent
from swarm.hop.answers import HopListener, HopReply, Tensors
from swarm.hop.calls import EvaluateCalls, Line, TrainCalls
from swarm.hop.continuation import Continuation
from swarm.hop.obstacle import Obstacle
from swarm.hop.retries import HopLimits, Retries
from swarm.hop.session import Order
from swarm.hop.session_calls import SessionCalls
from swarm.machine.clock import Clock
from swarm.machine.repeats import Repeats
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.generation_pb2_grpc import GenerationServiceStub
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.rpc.wire import TensorSpec
from swarm.training.microbatch import Microbatch
from swarm.types import PROTOCOL_VERSION, PeerId, PeerRecord

_Answer = TypeVar("_Answer")


class Hop:
    """Hands microbatches to the peers of one stage."""

    def __init__(
        self, *, run_id: str, stage: int, reply_specs: Mapping[str, TensorSpec], router: Router,
        channels: ChannelPool, clock: Clock, limits: HopLimits | None = None, events: Events | None = None,
    ) -> None:  # fmt: skip
        self.stage = stage
        self._router = router
        self._clock = clock
        self._limits = limits or HopLimits()
        self._events = events or NoEvents()
        self._repeats = Repeats(clock)
        self._under_way: set[Retries] = set()
        self._line = Line(self._limits.silence_seconds)
        address = pb.Address(run_id=run_id, protocol_version=PROTOCOL_VERSION, stage=stage)

        def stub(record: PeerRecord) -> Any:
            return StageServiceStub(channels.channel(record))

        self._train_calls = TrainCalls(
            address=address, reply_specs=reply_specs, stub=stub, router=router, clock=clock, limits=self._limits,
            line=self._line,
        )  # fmt: skip
        self._evaluate_calls = EvaluateCalls(address=address, stub=stub, limits=self._limits, line=self._line)
        self._session_calls = SessionCalls(
            address=address,
            stub=lambda record: GenerationServiceStub(channels.channel(record)),
            limits=self._limits,
        )

    @property
    def is_held_up(self) -> bool:
        """Whether one more microbatch would wait here for those before it: for the line, or for a place downstream."""
        return self._line.is_busy or any(retries.is_refused for retries in self._under_way)

    @property
    def obstacle(self) -> Obstacle | None:
        """Why none of the stage's peers takes what is under way here; None if one does, or will in a moment."""
        return next((each for retries in self._under_way if (each := retries.obstacle()) is not None), None)

    async def train(
        self, microbatch: Microbatch, tensors: Tensors, listener: HopListener, hints: Mapping[int, PeerId]
    ) -> HopReply:
        """Have the stage, and all after it, compute one microbatch.

        Args:
            hints: peers that worked on the microbatch before, by stage.

        Raises:
            Fatal: a peer refused the request itself, or too many peers failed.
        Cancellation closes the stream, which makes the peer roll back.
        """
        retries = self._retries(hints)

        async def once(record: PeerRecord) -> HopReply:
            self._events.write(
                HopEvent(
                    microbatch=microbatch.index, round=microbatch.round, stage=self.stage, peer=record.peer_id,
                    attempt=retries.num_failures + retries.num_busy + retries.num_sent_on + 1,
                )
            )  # fmt: skip
            return await self._train_calls.train(record, microbatch, tensors, listener, retries)

        return await self._until_answered(once, microbatch.num_samples, listener, retries)

    async def evaluate(
        self, tensors: Tensors, *, round_number: int, logits: TensorSpec | None = None,
        listener: HopListener | None = None,
    ) -> float | torch.Tensor:  # fmt: skip
        """Forward only, on the anchor of a round: the mean loss, or the last position's logits if asked for.

        Args:
            tensors: `tokens` (B, T + 1), the last column being only a target, and what else the stage takes.

        Raises:
            StaleMicrobatch: the swarm has moved on, and keeps that round's anchor no more.
            Fatal: a peer refused the request itself, or too many peers failed.
        Cancellation closes the stream.
        """
        heard_by = listener or HopListener()

        async def once(record: PeerRecord) -> float | torch.Tensor:
            try:
                return await self._evaluate_calls.evaluate(record, tensors, round_number, logits, heard_by)
            except RoundMismatch as error:
                if error.peer_round > round_number:
                    raise StaleMicrobatch(f"round {round_number} is not kept any more: {error}") from None
                raise

        return await self._until_answered(once, tensors["tokens"].shape[0], heard_by, self._retries())

    def continuation(
        self, order: Order, *, rounds: tuple[int, ...] = (), newest_round: int | None = None
    ) -> Continuation:
        """The stage, and all after it, as a session needs them.

        Args:
            rounds: whose weights they are to use, with which the session began elsewhere.
            newest_round: where it has not, that of the stage before.
        """
        return Continuation(
            order, stage=self.stage, calls=self._session_calls, router=self._router, clock=self._clock,
            limits=self._limits, rounds=rounds, newest_round=newest_round,
        )  # fmt: skip

    def _retries(self, hints: Mapping[int, PeerId] | None = None) -> Retries:
        return Retries(
            stage=self.stage, router=self._router, clock=self._clock, limits=self._limits, repeats=self._repeats,
            hints=hints,
        )  # fmt: skip

    async def _until_answered(
        self,
        once: Callable[[PeerRecord], Awaitable[_Answer]],
        num_samples: int,
        listener: HopListener,
        retries: Retries,
    ) -> _Answer:
        num_cancels = _num_cancels()
        self._under_way.add(retries)
        try:
            while True:
                if _num_cancels() > num_cancels:
                    # gRPC may answer a cancellation that comes as a connection breaks with why it broke.
                    raise asyncio.CancelledError
                record = retries.choose(num_samples)
                if record is None:
                    listener.progress(self.stage, obstacle=retries.obstacle())
                    await self._clock.sleep(retries.wait_seconds())
                    continue
                try:
                    return await once(record)
                except (TryAnotherPeer, TryLater, MalformedMessage) as error:
                    retries.note(record, error)
        finally:
            self._under_way.remove(retries)


def _num_cancels() -> int:
    """How often this task was cancelled and not taken back: a task group that failed before leaves one behind."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
