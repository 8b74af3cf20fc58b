"""The gRPC face of a stage: StageService.

Reads a request, checks it, hands it to the stage, and streams the answer. A call only subscribes to a computation, it
never owns one: when the upstream dies and gRPC cancels the call, the work goes on for the retry that will join it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from google.protobuf.message import Message

from swarm.errors import DeadlineExceeded, MalformedMessage, NotReady, Overloaded, StaleMicrobatch
from swarm.hop.answers import HopListener, pack_route, unpack_route
from swarm.machine.out_of_memory import is_out_of_memory, what_was_asked
from swarm.rpc.bounds import CHUNK_BYTES, SMALL_CHUNK_BYTES
from swarm.rpc.callers import Callers, caller_of
from swarm.rpc.failures import answers_errors
from swarm.rpc.local import is_local
from swarm.rpc.serving import Context, check_address, require_block, send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer
from swarm.rpc.wire import Frame, TensorSpec, frames
from swarm.stage.boundary import GRADIENT, Boundary, request_specs
from swarm.stage.call import Incoming, with_progress
from swarm.stage.computation import Computation
from swarm.stage.evaluation import Evaluation
from swarm.stage.spot_check import SpotCheck
from swarm.stage.stage import Stage
from swarm.training import samples
from swarm.training.samples import Microbatch
from swarm.types import TRAINER_ACK_SECONDS, Block

PROGRESS_SECONDS = 1.0
"""Time between two looks at what a microbatch waits for."""
UNCHANGED = 3
"""After this many looks without news the caller gets a sign of life. It is not sent more often, because each message
costs both ends about half a millisecond, for each microbatch in flight."""
MAX_WAIT_SECONDS = 5.0
"""Longest wait for the next round."""
ACK_SECONDS = 120.0
"""The least time that stages after stage 0 wait for an acknowledgement (see `ack_seconds`). Their caller first waits
for its own acknowledgement, but it may also be frozen for ever."""
WAY_BACK = 6.0
"""The way back through the stages before may take this many times as long as the way there: a backward is the work of
two forwards, or of three if the forward is computed again, and each stage first finishes what it has begun."""
LONGEST_ACK_SECONDS = 3600.0
"""The longest wait for an acknowledgement, even if the microbatch's way here took longer, for example because it waited
for a stage without peers."""


@answers_errors
class StageServicer(StageServiceServicer):
    def __init__(
        self, stage: Stage, *, describe: Callable[[], pb.DescribeReply], callers: Callers, spot_check: SpotCheck,
        rival_of: Callable[[pb.Incarnation], Awaitable[pb.Incarnation | None]] | None = None,
    ) -> None:  # fmt: skip
        """`rival_of` finds another process that serves under the identity of the peer that asks; None if there is none.
        `callers` counts what is kept for each caller; shared with the guard."""
        self._config = stage.context.config
        self._stage = stage
        self._evaluation = Evaluation(stage)
        self._spot_check = spot_check
        self._describe = describe
        self._rival_of = rival_of
        self._callers = callers

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        # A process of another run describes itself: its answer names its run.
        if request.HasField("stage") and request.run_id in ("", self._config.run_id):
            require_block(Block(request.stage, request.variant), self._stage.block)
        if request.HasField("after_round"):
            # A stranger may send a negative number or NaN: then there is no wait.
            seconds = min(MAX_WAIT_SECONDS, request.wait_seconds) if request.wait_seconds > 0 else 0.0
            with contextlib.suppress(TimeoutError):
                await self._stage.present_round.reach(request.after_round + 1, seconds)
        reply = self._describe()
        if request.HasField("caller") and self._rival_of is not None:
            reply.MergeFrom(pb.DescribeReply(rival=await self._rival_of(request.caller)))
        if request.tally:
            reply.tally = self._stage.context.backend.weights.round.tally.to_text()
        return reply

    # -- training ----------------------------------------------------------------------------------------------------

    # The generated type knows only iterators, but grpc also takes a coroutine that uses the context to read and write.
    async def Train(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        incoming = self._incoming(pb.TrainRequest, context)
        try:
            await self._train(context, incoming)
        except Overloaded as busy:
            self._stage.counters["busy_replies"] += 1
            reason = pb.Busy(retry_after_seconds=busy.retry_after_seconds, reason=str(busy), round=self._stage.round)
            await send(context, pb.TrainReply(busy=reason))
            await incoming.drain()
        except Exception:
            await incoming.drain()
            raise
        finally:
            incoming.close()

    async def _train(self, context: Context, incoming: Incoming) -> None:
        opening: pb.Open | None = await incoming.opening()
        if opening is None:
            raise MalformedMessage("a microbatch begins with Open")
        specs = request_specs(self._stage.context.config_in(opening.round), self._stage.number)
        if opening.eager:
            incoming.expect(specs, training=True)
        check_address(opening.address, run_id=self._config.run_id, block=self._stage.block)
        microbatch = self._microbatch(opening)
        computation = await self._compute(context, incoming, opening, microbatch, specs)
        try:
            with self._stage.answers.unacknowledged():
                if await self._read_ack(incoming, opening):
                    self._check_owner(context, computation)
                    await self._acknowledge(context, computation, opening.wants_statement)
        finally:
            # Does nothing after an ack, or when another call has taken over.
            self._stage.endings.abandon(computation, context)

    async def _acknowledge(self, context: Context, computation: Computation, wants_statement: bool) -> None:
        if not self._spot_check.own.may_count(computation):
            raise StaleMicrobatch("it had other inputs before, so it counts at another peer")
        self._stage.endings.acknowledge(computation)
        wants_statement &= not is_local(context)  # Within one process nobody would check it.
        if wants_statement and (signed := self._spot_check.own.state(computation)) is not None:
            await send(context, pb.TrainReply(statement=signed))

    async def _read_ack(self, incoming: Incoming, opening: pb.Open) -> bool:
        """Whether the answer was acknowledged. If not, the caller is gone. Raises DeadlineExceeded."""
        now = asyncio.get_running_loop().time
        patience_seconds = ack_seconds(self._stage.number, opening.way_seconds)
        deadline = now() + patience_seconds
        message, _ = await incoming.read(patience_seconds)
        if message is None:
            return False
        if now() > deadline:
            # The acknowledgement came while this process stood still, and was noticed before the time-out.
            raise DeadlineExceeded("an acknowledgement came too late")
        if not message.HasField("ack"):
            raise MalformedMessage("after Done only an Ack is expected")
        return True

    async def _compute(
        self, context: Context, incoming: Incoming, opening: pb.Open, microbatch: Microbatch,
        specs: Mapping[str, TensorSpec],
    ) -> Computation:  # fmt: skip
        """Handle a microbatch from the admission to Done. Its slot is free again when the answer is sent."""
        slot = self._stage.admission.admit(microbatch, incoming.caller, has_others=opening.has_others)
        try:
            # Tensors that come with the opening have to be read in any case.
            tensors = await incoming.tensors() if opening.eager else self._stage.known_inputs(microbatch)
            if tensors is None:
                incoming.expect(specs, training=True)
            await send(context, pb.TrainReply(accepted=pb.Accepted(has_tensors=tensors is not None)))
            if tensors is None:
                tensors = await incoming.tensors()
                await send(context, pb.TrainReply(progress=pb.Progress(stage=self._stage.number)))
            hints = unpack_route(opening.hints)
            await self._until_due(context, microbatch)
            computation = self._stage.begin(microbatch, tensors, hints, context)
            try:
                await self._stream_news(context, computation)
                self._stage.counters["rerouted_backwards"] += opening.rerouted_backward
                await self._answer(context, computation, microbatch, opening)
            except BaseException:
                self._stage.endings.abandon(computation, context)
                raise
            return computation
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._stage.admission.ran_out_of_memory(error, slot)
            raise NotReady(f"no memory for the microbatch: no room for {what_was_asked(error)}") from None
        finally:
            self._stage.admission.leave(slot)

    async def _until_due(self, context: Context, microbatch: Microbatch) -> None:
        """Wait until a microbatch may be computed. Raises NotReady if that would take long."""
        number, seconds = self._stage.setting.due_round(microbatch), self._stage.context.limits.round_wait_seconds
        if self._stage.round < number:
            waiting = asyncio.ensure_future(self._stage.present_round.wait_for(number, seconds))
            await with_progress(context, waiting, HopListener(self._stage.number), pb.TrainReply)

    async def _stream_news(self, context: Context, computation: Computation) -> None:
        said, num_unchanged = pb.Progress(stage=self._stage.number), 0
        while not computation.done:
            await computation.news(PROGRESS_SECONDS)
            self._check_owner(context, computation)
            progress = computation.message
            num_unchanged = num_unchanged + 1 if progress == said else UNCHANGED
            if num_unchanged >= UNCHANGED:
                said, num_unchanged = progress, 0
                await send(context, pb.TrainReply(progress=progress))

    @staticmethod
    def _check_owner(context: Context, computation: Computation) -> None:
        if computation.subscriber is not context:
            raise StaleMicrobatch("another call took this microbatch over")

    async def _answer(
        self, context: Context, computation: Computation, microbatch: Microbatch, opening: pb.Open
    ) -> None:
        result = computation.result()
        # A replay may have joined a computation that was begun before it.
        tensors = {}
        if result.gradient is not None and microbatch.answers_gradient(self._stage.number):
            tensors = {GRADIENT: result.gradient}
        with self._stage.answers.written(len(tensors)):
            boundary = self._stage.context.backend.boundary_in(computation.microbatch.round)
            chunk_bytes = SMALL_CHUNK_BYTES if opening.small_messages else CHUNK_BYTES
            last = await _send_tensors(context, tensors, boundary, chunk_bytes)
            done = pb.Done(
                loss=result.loss,
                num_targets=samples.amount(computation.order.wire_inputs).targets,
                route=pack_route(result.route),
                busy_seconds=result.busy_seconds,
                queue_length=self._stage.context.runtime.queue_length,
                credits=self._stage.admission.grants(has_others=opening.has_others),
                num_reroutes=result.num_reroutes,
                anchor_round=computation.anchor_round,
            )
            last.message.MergeFrom(pb.TrainReply(done=done))
            await send(context, last)

    def _incoming(self, kind: type[Message], context: Context) -> Incoming:
        memory = self._stage.context.backend.staging.host_bytes
        return Incoming(kind, context, caller_of(context), self._callers, memory)

    def _microbatch(self, opening: pb.Open) -> Microbatch:
        size = self._config.data.microbatch_size
        if opening.num_samples != size:
            raise MalformedMessage(f"a microbatch of this run has {size} samples, not {opening.num_samples}")
        self._stage.context.hop_on(self._config.path_of(opening.microbatch))  # Refuses what belongs elsewhere.
        only_at = opening.accumulate_only_at if opening.HasField("accumulate_only_at") else None
        return Microbatch(
            index=opening.microbatch,
            round=opening.round,
            num_samples=size,
            accumulate_only_at=only_at,
            since=asyncio.get_running_loop().time() - opening.way_seconds,
        )

    # -- evaluation --------------------------------------------------------------------------------------------------

    # A coroutine, like Train.
    async def Evaluate(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        incoming = self._incoming(pb.EvaluateRequest, context)
        try:
            await send(context, pb.EvaluateReply(evaluated=await self._evaluation.answer(context, incoming)))
        except Exception:
            await incoming.drain()
            raise
        finally:
            incoming.close()

    # This call waits for its caller to go, and has no use for a generator.
    async def Hold(self, request: pb.HoldRequest, context: Context) -> None:  # type: ignore[override]
        await self._evaluation.hold(context, request)

    # -- spot checks -------------------------------------------------------------------------------------------------

    async def SpotCheck(self, request: pb.SpotCheckRequest, context: Context) -> pb.SpotCheckReply:
        return await self._spot_check.answer(context, request)

    # A coroutine, like Train.
    async def Show(self, request: pb.ShowRequest, context: Context) -> None:  # type: ignore[override]
        await self._spot_check.own.show(context, request)


async def _send_tensors(
    context: Context, tensors: Mapping[str, torch.Tensor], boundary: Boundary, chunk_bytes: int
) -> Frame:
    """Send all messages of the tensors except the last one. Return the last one, so that the caller can add to it."""
    messages = frames(pb.TrainReply(), tensors, boundary.encodings, whole=is_local(context), chunk_bytes=chunk_bytes)
    last = next(messages)
    for following in messages:
        await send(context, last)
        last = following
    return last


def ack_seconds(stage: int, way_seconds: float) -> float:
    """The seconds for which a peer of a stage waits for the acknowledgement of its answer.

    Until then the peer gets no message from its caller. The stages before it do their backwards first, one after the
    other. So the wait is longer for deeper stages, and if the stages before are slow: if the microbatch was long on its
    way here, by the caller's account.
    """
    if stage == 0:
        return TRAINER_ACK_SECONDS
    return max(ACK_SECONDS, min(LONGEST_ACK_SECONDS, WAY_BACK * way_seconds))
