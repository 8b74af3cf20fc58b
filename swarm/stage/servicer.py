"""The gRPC face of a stage: StageService.

Reads a request, checks it, hands it to the stage, and streams the answer. A call only subscribes to a
computation, it never owns one: when the upstream dies and gRPC cancels the call, the work goes on for the
retry that will join it. Never touches weights.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from swarm.config import RunConfig
from swarm.errors import (
    DeadlineExceeded,
    MalformedMessage,
    NotReady,
    Overloaded,
    PeerUnavailable,
    RoundMismatch,
    StaleMicrobatch,
    SwarmError,
)
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.hop.route import pack_route, unpack_route
from swarm.machine.out_of_memory import is_out_of_memory, what_was_asked
from swarm.rpc.address import check_address
from swarm.rpc.callers import Caller, Callers, caller_of
from swarm.rpc.channels import abort, send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer
from swarm.rpc.wire import filled
from swarm.stage.boundary import GRADIENT, HIDDEN, LOGITS, TOKENS, logits_spec, request_specs
from swarm.stage.computation import Computation
from swarm.stage.incoming import Incoming
from swarm.stage.stage import Stage
from swarm.stage.task_queue import Priority
from swarm.training.microbatch import Microbatch

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0
"""Time between two looks at what a microbatch waits for."""
UNCHANGED = 3
"""Looks that find nothing new before the caller hears of it all the same: a sign of life. Each costs both ends half a
millisecond or so, for each microbatch in flight."""
MAX_WAIT_SECONDS = 5.0
"""Longest wait for the next round."""
TRAINER_ACK_SECONDS = 7.0
"""A trainer acknowledges an answer as soon as it has it, and stage 0 takes no acknowledgement later than this: the
network may have held it back until another trainer was given the microbatch."""
ACK_SECONDS = 120.0
"""Other stages' upstream waits for its own acknowledgement first; but it may also be frozen for good. So much at least:
see `ack_seconds`."""
WAY_BACK = 6.0
"""The stages before take up to so many times longer for the way back than they took for the way there: a backward is
two forwards' work, or three with the forward computed again, and what is begun at each of them is finished first."""
LONGEST_ACK_SECONDS = 3600.0
"""However long the way was: it may have been waiting for a stage without peers."""
Context = Any
"""grpc.aio.ServicerContext; its type arguments differ between calls."""
_Reply = TypeVar("_Reply", pb.TrainReply, pb.EvaluateReply)


class StageServicer(StageServiceServicer):
    """Serves one stage."""

    def __init__(
        self, *, config: RunConfig, stage: Stage, hop: Hop | None, describe: Callable[[], pb.DescribeReply],
        callers: Callers | None = None,
        rival_of: Callable[[pb.Incarnation], Awaitable[pb.Incarnation | None]] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            rival_of: finds the process that serves under the identity of a peer that asks, if that is not the same.
            callers: counts what is kept for each of them; the guard's.
        """
        self._config = config
        self._stage = stage
        self._hop = hop
        self._describe = describe
        self._rival_of = rival_of
        self._callers = callers or Callers()
        self._specs = request_specs(config, stage.number)
        self._evaluating = asyncio.Lock()
        """One evaluation is at the compute thread, so that they take no place there from training."""
        self._turns: WeakValueDictionary[Caller, asyncio.Lock] = WeakValueDictionary()
        """One of each caller waits for that, so that nobody's many keep others waiting."""

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        if request.HasField("after_round"):
            # Negative or no number, as a stranger may send: no wait.
            seconds = min(MAX_WAIT_SECONDS, request.wait_seconds) if request.wait_seconds > 0 else 0.0
            with contextlib.suppress(TimeoutError):
                await self._stage.reach_round(request.after_round + 1, seconds)
        reply = self._describe()
        if request.HasField("caller") and self._rival_of is not None:
            reply.MergeFrom(pb.DescribeReply(rival=await self._rival_of(request.caller)))
        return reply

    # -- training ----------------------------------------------------------------------------------------------------

    # The generated type knows only iterators; grpc takes a coroutine that reads and writes the context as well.
    async def Train(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        incoming = Incoming(context, caller_of(context), self._callers)
        try:
            await self._train(context, incoming)
        except Overloaded as busy:
            self._stage.counters.busy_replies += 1
            reason = pb.Busy(retry_after_seconds=busy.retry_after_seconds, reason=str(busy), round=self._stage.round)
            await send(context, pb.TrainReply(busy=reason))
            await incoming.drain()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this call and nothing else
            await incoming.drain()
            await _refuse(context, error)
        finally:
            incoming.close()

    async def _train(self, context: Context, incoming: Incoming) -> None:
        opening: pb.Open | None = await incoming.opening()
        if opening is None:
            raise MalformedMessage("a microbatch begins with Open")
        if opening.eager:
            incoming.expect(self._specs, training=True)
        self._check_address(opening.address)
        microbatch = self._microbatch(opening)
        computation = await self._compute(context, incoming, opening, microbatch)
        self._stage.num_unacknowledged += 1
        try:
            now = asyncio.get_running_loop().time
            patience_seconds = ack_seconds(self._stage.number, opening.way_seconds)
            deadline = now() + patience_seconds
            acknowledged = await incoming.read(patience_seconds)
            if acknowledged is None:
                return
            if now() > deadline:
                # It came while this process was stopped; the time-out may be noticed after it.
                raise DeadlineExceeded("an acknowledgement came too late")
            if not acknowledged.HasField("ack"):
                raise MalformedMessage("after Done only an Ack is expected")
            self._check_owner(context, computation)
            self._stage.acknowledge(computation)
        finally:
            self._stage.num_unacknowledged -= 1
            # Does nothing after an ack, or when another call has taken over.
            self._stage.abandon(computation, context)

    async def _compute(
        self, context: Context, incoming: Incoming, opening: pb.Open, microbatch: Microbatch
    ) -> Computation:
        """From the admission to Done; the slot is free again when the answer is sent."""
        slot = self._stage.admit(microbatch, incoming.caller, has_others=opening.has_others)
        try:
            # What comes at once has to be read.
            tensors = await incoming.tensors() if opening.eager else self._stage.known_inputs(microbatch)
            if tensors is None:
                incoming.expect(self._specs, training=True)
            await send(context, pb.TrainReply(accepted=pb.Accepted(has_tensors=tensors is not None)))
            if tensors is None:
                tensors = await incoming.tensors()
                await send(context, pb.TrainReply(progress=pb.Progress(stage=self._stage.number)))
            hints = unpack_route(opening.hints)
            still_waiting = self._signs_of_life(context)
            computation = await self._stage.begin(microbatch, tensors, hints, context, still_waiting)
            try:
                await self._stream_news(context, computation)
                self._stage.counters.rerouted_backwards += opening.rerouted_backward
                await self._answer(context, computation, microbatch, opening.has_others)
            except BaseException:
                self._stage.abandon(computation, context)
                raise
            return computation
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._stage.ran_out_of_memory(error, slot)
            raise NotReady(f"no memory for the microbatch: no room for {what_was_asked(error)}") from None
        finally:
            self._stage.leave(slot)

    def _signs_of_life(self, context: Context) -> Callable[[], Awaitable[None]]:
        """To be called while this stage is what is waited for: a caller would take silence for death."""
        now = asyncio.get_running_loop().time
        said_at = now()

        async def say() -> None:
            nonlocal said_at
            if now() - said_at >= PROGRESS_SECONDS:
                said_at = now()
                await send(context, pb.TrainReply(progress=pb.Progress(stage=self._stage.number)))

        return say

    async def _stream_news(self, context: Context, computation: Computation) -> None:
        said, num_unchanged = pb.Progress(stage=self._stage.number), 0
        while not computation.done:
            await computation.news(PROGRESS_SECONDS)
            self._check_owner(context, computation)
            progress = pb.Progress(
                stage=computation.waiting_stage, no_peer=computation.no_peer, route=pack_route(computation.route)
            )
            num_unchanged = num_unchanged + 1 if progress == said else UNCHANGED
            if num_unchanged >= UNCHANGED:
                said, num_unchanged = progress, 0
                await send(context, pb.TrainReply(progress=progress))

    @staticmethod
    def _check_owner(context: Context, computation: Computation) -> None:
        if computation.subscriber is not context:
            raise StaleMicrobatch("another call took this microbatch over")

    async def _answer(
        self, context: Context, computation: Computation, microbatch: Microbatch, has_others: bool
    ) -> None:
        result = computation.result()
        # A replay may have joined a computation that was begun before it.
        tensors = {}
        if result.gradient is not None and microbatch.answers_gradient(self._stage.number):
            tensors = {GRADIENT: result.gradient}
        self._stage.num_answering += len(tensors)
        try:
            reply = await _send_tensors(context, tensors, pb.TrainReply())
            done = pb.Done(
                loss=result.loss, num_tokens=result.num_tokens, route=pack_route(result.route),
                busy_seconds=result.busy_seconds, queue_length=self._stage.runtime.queue_length,
                credits=self._stage.grants(has_others=has_others), num_reroutes=result.num_reroutes,
            )  # fmt: skip
            reply.done.CopyFrom(done)
            await send(context, reply)
        finally:
            self._stage.num_answering -= len(tensors)

    def _microbatch(self, opening: pb.Open) -> Microbatch:
        size = self._config.data.microbatch_size
        if opening.num_samples != size:
            raise MalformedMessage(f"a microbatch of this run has {size} samples, not {opening.num_samples}")
        only_at = opening.accumulate_only_at if opening.HasField("accumulate_only_at") else None
        round_of = opening.microbatch // self._config.microbatches_per_round
        if self._config.rounds.synchronous and round_of != opening.round:
            raise MalformedMessage(f"microbatch {opening.microbatch} belongs to round {round_of}, not {opening.round}")
        return Microbatch(
            index=opening.microbatch, round=opening.round, num_samples=size, accumulate_only_at=only_at,
            since=asyncio.get_running_loop().time() - opening.way_seconds,
        )  # fmt: skip

    # -- evaluation --------------------------------------------------------------------------------------------------

    # As with Train.
    async def Evaluate(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        incoming = Incoming(context, caller_of(context), self._callers)
        try:
            await self._evaluate(context, incoming)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this call and nothing else
            await incoming.drain()
            await _refuse(context, error)
        finally:
            incoming.close()

    async def _evaluate(self, context: Context, incoming: Incoming) -> None:
        opening: pb.EvaluateOpen | None = await incoming.opening()
        if opening is None:
            raise MalformedMessage("an evaluation begins with its open message")
        self._check_address(opening.address)
        data = self._config.data
        if not (
            0 < opening.num_samples <= data.microbatch_size and 0 < opening.sequence_length <= data.sequence_length
        ):
            raise MalformedMessage(
                f"an evaluation has at most {data.microbatch_size} samples of {data.sequence_length} tokens, not "
                f"{opening.num_samples} of {opening.sequence_length}"
            )
        specs = request_specs(self._config, self._stage.number, opening.num_samples, opening.sequence_length)
        incoming.expect(specs, training=False)
        synchronous = self._config.rounds.synchronous
        backend = self._stage.backend

        def anchor() -> dict[str, torch.Tensor]:
            # With DiLoCo the stages need not be at one round: each answers with its newest anchor up to the named one.
            parameters = backend.weights.anchor(opening.round if synchronous else min(opening.round, self._stage.round))
            if parameters is None:
                raise RoundMismatch(
                    f"round {opening.round} is not kept, this peer is at {self._stage.round}",
                    peer_round=self._stage.round,
                )
            return parameters

        anchor()
        tensors = await incoming.tensors()

        async def in_turn() -> Any:
            async with self._turns.setdefault(incoming.caller, asyncio.Lock()), self._evaluating:
                output, _ = await self._stage.runtime.run(
                    # The anchor not before: what waits must not keep a round's weights.
                    lambda: backend.evaluate(tensors, anchor(), want_logits=opening.want_logits),
                    # A forward among the others: behind all of them it would never have its turn at a bottleneck.
                    priority=Priority.FORWARD, age=self._stage.next_age(),
                )  # fmt: skip
                return output

        output = await self._with_progress(context, asyncio.ensure_future(in_turn()), _Awaited(self._stage.number))
        if not backend.is_last:
            assert self._hop is not None
            awaited = _Awaited(self._hop.stage)
            downstream = asyncio.ensure_future(
                self._hop.evaluate(
                    {TOKENS: tensors[TOKENS], HIDDEN: output}, round_number=opening.round,
                    logits=logits_spec(self._config, opening.num_samples) if opening.want_logits else None,
                    listener=awaited,
                )
            )  # fmt: skip
            output = await self._with_progress(context, downstream, awaited)
        loss = 0.0 if opening.want_logits else float(output)
        evaluated = pb.Evaluated(loss=loss, num_tokens=opening.num_samples * opening.sequence_length)
        reply = await _send_tensors(context, {LOGITS: output} if opening.want_logits else {}, pb.EvaluateReply())
        reply.evaluated.CopyFrom(evaluated)
        await send(context, reply)

    async def _with_progress(self, context: Context, work: "asyncio.Future[Any]", awaited: "_Awaited") -> Any:
        try:
            while not (await asyncio.wait([work], timeout=PROGRESS_SECONDS))[0]:
                progress = pb.Progress(stage=awaited.stage, no_peer=awaited.no_peer)
                await send(context, pb.EvaluateReply(progress=progress))
        finally:
            work.cancel()
        return work.result()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _check_address(self, address: pb.Address) -> None:
        check_address(address, run_id=self._config.run_id, stage=self._stage.number)


class _Awaited(HopListener):
    """The deepest stage that an evaluation waits for, and whether nobody serves it."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.no_peer = False

    def progress(self, stage: int, *, no_peer: bool) -> None:
        self.stage, self.no_peer = stage, no_peer


async def _send_tensors(context: Context, tensors: Mapping[str, torch.Tensor], first: _Reply) -> _Reply:
    """Send all messages of the tensors but the last, which is given: with room for what else is to be said."""
    messages = filled(first, tensors)
    last = next(messages)
    for following in messages:
        await send(context, last)
        last = following
    return last


async def _refuse(context: Context, error: Exception) -> None:
    """End a call with an error; one that is not ours is a bug, and this peer's fault."""
    if is_out_of_memory(error):
        logger.warning("a call failed for want of memory: no room for %s", what_was_asked(error))
        error = PeerUnavailable("this peer is out of memory")
    if not isinstance(error, SwarmError):
        logger.exception("a call failed", exc_info=error)
        error = PeerUnavailable(f"internal error: {type(error).__name__}")
    await abort(context, error)


def ack_seconds(stage: int, way_seconds: float) -> float:
    """How long a peer of a stage waits for the acknowledgement of its answer.

    Nothing is heard of its caller until then. The stages before do their backward first, each after the other: the
    deeper the stage, and the slower they are, the longer that takes.

    Args:
        way_seconds: the microbatch's on its way here, as its caller says.
    """
    if stage == 0:
        return TRAINER_ACK_SECONDS
    return max(ACK_SECONDS, min(LONGEST_ACK_SECONDS, WAY_BACK * way_seconds))
