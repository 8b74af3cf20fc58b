"""One microbatch at this stage, from its tensors to its acknowledgement.

    forward -> hop to the next stage -> backward -> (tentative) -> acknowledged | undone

A computation belongs to the stage, and goes on when the call dies that asked for it, so that a retry can join it.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch

from swarm.errors import MalformedMessage, NotReady, PeerUnavailable
from swarm.hop.answers import HopListener, HopReply
from swarm.hop.hop import Hop
from swarm.hop.spot_checks import ANCHOR_ROUND, LOSS, anchor_tensor, loss_tensor
from swarm.machine.clock import spawn, wait
from swarm.stage.backend import Forward, StageBackend
from swarm.stage.boundary import GRADIENT, HIDDEN, OUTPUT, OUTPUT_GRADIENT
from swarm.stage.buckets import Accumulated
from swarm.stage.runtime import Priority, Runtime
from swarm.stage.staging import Download
from swarm.training import samples
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer of a computation to the stage before."""

    loss: float
    gradient: torch.Tensor | None
    route: Mapping[Block, PeerId]
    num_reroutes: int
    busy_seconds: float


@dataclass(frozen=True, kw_only=True)
class Order:
    """The instructions for a computation.

    Attributes:
        wire_inputs: the tensors that the stage received, on the CPU.
        accumulate: whether the gradient joins this stage's sum.
        answers_gradient: whether the stage before wants the gradient of its output. With `accumulate` this gradient is
            computed in any case, because another replay may want it.
        age: its age in the compute thread's queue; smaller is older.
        hints: which peers of later stages know the microbatch already.
        adopts: a computation of the same microbatch that was accumulated earlier, with other activations. The
            acknowledgement of this one settles both; without it both are undone.
        earlier: a finished computation of the same microbatch with the same weights. What it sent and answered is not
            computed again.
    """

    microbatch: Microbatch
    wire_inputs: Mapping[str, torch.Tensor]
    accumulate: bool
    answers_gradient: bool
    age: int
    hints: Mapping[Block, PeerId]
    adopts: "Computation | None" = None
    earlier: "Computation | None" = None

    @property
    def has_backward(self) -> bool:
        """Whether this stage has to run a backward; in a replay for a later stage it need not."""
        return self.accumulate or self.answers_gradient


class Computation(HopListener):
    """Computes one microbatch, and keeps the answer until it is acknowledged or undone.

    Args:
        turn: is entered before the forward, and left once the gradient is in the sum or will never be.
        on_accumulated: called once the gradient is in the sum.

    Attributes:
        subscriber: the call that gets the answer; a newer one takes its place.
    """

    def __init__(
        self,
        order: Order,
        *,
        backend: StageBackend,
        runtime: Runtime,
        hop: Hop | None,
        turn: AbstractAsyncContextManager[None],
        on_accumulated: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(backend.stage)
        self.order = order
        self.subscriber: object | None = None
        self._backend, self._runtime = backend, runtime
        self._hop = hop
        self._turn = turn
        self._on_accumulated = on_accumulated
        self._is_wanted = asyncio.Event()
        self._news = asyncio.Event()
        self._wire_hidden: torch.Tensor | None = None
        """The encoded output that the next stage got."""
        self._forward: Forward | None = None
        self._accumulated: Accumulated | None = None
        self._reply: HopReply | None = None
        self._task: asyncio.Task[None] | None = None
        self._result: Result | None = None
        self._error: Exception | None = None

    @property
    def microbatch(self) -> Microbatch:
        return self.order.microbatch

    @property
    def adopts(self) -> "Computation | None":
        return self.order.adopts

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin in a task of its own, whose error is kept for the call that asks for the result. Raises NotReady."""
        self._task = spawn(tasks, self._run())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Not in `_run`, because a task that is cancelled before its first step never runs.
        if task.cancelled():
            self._error = NotReady("the computation was given up")
        self._news.set()

    # -- what a waiting call sees ----------------------------------------------------------------------------------

    def subscribe(self, subscriber: object) -> None:
        """Let `subscriber` have the answer. A former subscriber learns that it was superseded."""
        self.subscriber = subscriber
        self._is_wanted.set()
        self._news.set()

    def orphan(self) -> object:
        """Note that no call waits for the answer any more. Nothing is computed until a call subscribes again. Returns
        the object that takes the subscriber's place."""
        self.subscribe(object())
        self._is_wanted.clear()
        return self.subscriber

    async def news(self, seconds: float) -> None:
        """Wait until the computation is done, its route changes, or another call takes over; at most for `seconds`."""
        if not self.done:
            await wait(self._news, seconds)
            self._news.clear()

    def routed(self, route: Mapping[Block, PeerId]) -> None:
        super().routed(route)
        self._news.set()

    @property
    def has_forward(self) -> bool:
        """Whether it computes a forward; if not, the result of an earlier one is used."""
        return self._earlier_answer() is None and self._earlier_hidden() is None

    @property
    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._result is not None or self._error is not None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def result(self) -> Result:
        """The answer. Raises the error that ended the computation. Only once `done`."""
        if self._error is not None:
            raise self._error
        assert self._result is not None, "asked for a result before there is one"
        return self._result

    def exchanged(self) -> dict[str, torch.Tensor] | None:
        """All that this stage received, sent on, got back and answered; None if that is not in the sum, or not kept."""
        if self._result is None or self._accumulated is None:
            return None
        made = {OUTPUT: self._wire_hidden, GRADIENT: self._result.gradient, **self.order.wire_inputs}
        made |= {OUTPUT_GRADIENT: self._accumulated.source.wire_gradient, LOSS: loss_tensor(self._result.loss)}
        made[ANCHOR_ROUND] = None if self.anchor_round is None else anchor_tensor(self.anchor_round)
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    @property
    def anchor_round(self) -> int | None:
        """The round whose anchor its gradient in the sum was computed with; None if there is none, or no anchor."""
        return None if self._accumulated is None else self._accumulated.source.version.anchor_round

    @property
    def sketch(self) -> torch.Tensor:
        """Of its gradient in the sum (training/sketches); empty if that is not there, or not sketched. Once `done`."""
        return torch.empty(0) if self._accumulated is None else self._accumulated.sketch.wait()

    # -- the end ---------------------------------------------------------------------------------------------------

    async def settle(self, *, keep_answer: bool) -> None:
        """Note that the gradient stays in the sum. The answer may be kept for a later computation of the microbatch."""
        if self._result is not None and not keep_answer:
            self._result, self._wire_hidden = dataclasses.replace(self._result, gradient=None), None
        accumulated = self._accumulated
        if accumulated is not None:
            await self._runtime.control(lambda: self._backend.settle(accumulated))

    async def acknowledge_downstream(self) -> None:
        if self._reply is not None:
            reply, self._reply = self._reply, None
            await reply.ack()

    def close_downstream(self) -> None:
        """Close the stream downstream, so that later stages give up their part of this computation, unless another one
        has adopted it there."""
        if self._reply is not None:
            self._reply.close()
            self._reply = None

    def stop(self) -> None:
        """Stop, here and downstream. `give_up` has to follow."""
        if self._task is not None:
            self._task.cancel()
        self.close_downstream()

    async def stopped(self) -> None:
        """Wait until the computation has stopped. A task that it has begun on the compute thread may still run."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def give_up(self) -> Accumulated | None:
        """Give up, once stopped. Runs on the compute thread. Returns this microbatch's gradient in the sum, which the
        caller has to take out; None if there is none."""
        if self._forward is not None:
            self._backend.release(self._forward)
        accumulated, self._accumulated, self._forward = self._accumulated, None, None
        return accumulated

    # -- the work --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            async with self._turn:
                boundary = self._backend.boundary_in(self.microbatch.round)
                await self._backend.function.checked(self.order.wire_inputs, boundary)
                result = self._earlier_answer() or await (self._run_last if self._hop is None else self._run_through)()
                if self._accumulated is not None:
                    await self._accumulated.sketch.arrived()
                self._result = result
        except Exception as error:  # noqa: BLE001 - kept for the caller; one microbatch must not end the peer
            self._error = error
            self._backend.weights.require_sound()

    def _earlier_answer(self) -> Result | None:
        """The answer of an earlier computation; None if there was none, or if a later stage lacks the microbatch."""
        only_at = self.microbatch.accumulate_only_at
        if self.order.earlier is None or only_at is None or only_at > self._backend.stage:
            return None
        return self.order.earlier.result()

    def _earlier_hidden(self) -> torch.Tensor | None:
        """What an earlier computation sent to the next stage; None if there was none, or a backward needs a forward."""
        return None if self.order.earlier is None or self.order.has_backward else self.order.earlier._wire_hidden

    async def _run_last(self) -> Result:
        def work() -> tuple[float, Download | None]:
            loss, gradient, self._accumulated = self._backend.forward_loss(
                self.microbatch.index, self.microbatch.round, self.order.wire_inputs,
                accumulate=self.order.accumulate, only_at=self.microbatch.accumulate_only_at,
            )  # fmt: skip
            return loss, gradient

        (loss, download), seconds = await self._compute(work, Priority.FORWARD)
        gradient = None if download is None else await download.arrived()
        if self.order.has_backward:
            self._on_accumulated()
        return Result(loss=loss, gradient=gradient, route={}, num_reroutes=0, busy_seconds=seconds)

    async def _run_through(self) -> Result:
        def forward() -> Download:
            forward = self._backend.forward(
                self.microbatch.index, self.microbatch.round, self.order.wire_inputs,
                has_backward=self.order.has_backward,
            )  # fmt: skip
            if self.order.has_backward:
                self._forward = forward
            assert forward.wire_hidden is not None
            return forward.wire_hidden

        def backward(wire_gradient: torch.Tensor) -> Download | None:
            assert self._forward is not None
            pending, self._forward = self._forward, None
            gradient, self._accumulated = self._backend.backward(
                pending, wire_gradient, accumulate=self.order.accumulate, only_at=self.microbatch.accumulate_only_at
            )
            return gradient

        assert self._hop is not None
        hidden, forward_seconds = self._earlier_hidden(), 0.0
        if hidden is None:
            download, forward_seconds = await self._compute(forward, Priority.FORWARD)
            hidden = await download.arrived()
        if self.order.accumulate:
            self._wire_hidden = hidden
        tensors = {**samples.of(self.order.wire_inputs), HIDDEN: hidden}
        self.awaited_stage = self._hop.block.stage
        try:
            self._reply = reply = await self._hop.train(self.microbatch, tensors, self, self.order.hints)
        except MalformedMessage as error:
            # The inputs were sound, so this peer may be at fault: another peer of this stage may do better.
            raise PeerUnavailable(f"the next stage refuses what this peer computed: {error}") from None
        self.progress(self._backend.stage, obstacle=None)
        gradient, backward_seconds = None, 0.0
        if self.order.has_backward:
            try:
                answer, backward_seconds = await self._compute(
                    lambda: backward(reply.tensors[GRADIENT]), Priority.BACKWARD
                )
            except MalformedMessage as error:
                raise PeerUnavailable(f"what the next stage answered is of no use: {error}") from None
            gradient = None if answer is None else await answer.arrived()
            self._on_accumulated()
        return Result(
            loss=reply.loss, gradient=gradient, route=reply.route, num_reroutes=reply.num_reroutes,
            busy_seconds=forward_seconds + backward_seconds,
        )  # fmt: skip

    async def _compute(self, work: Callable[[], _Result], priority: Priority) -> tuple[_Result, float]:
        """Run `work` on the compute thread in its turn, once some call wants it. Returns its result and the seconds.

        After a freeze, or when a trainer has died, no call wants most of the work that a peer has under way. If the
        peer did that work, it would only have more to take out again.
        """
        while True:
            await self._is_wanted.wait()
            done, seconds = await self._runtime.run(
                lambda: (work(),) if self._is_wanted.is_set() else None, priority=priority, age=self.order.age
            )
            if done is not None:
                return done[0], seconds
