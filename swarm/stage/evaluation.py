"""Evaluation of held-out text at one stage: a forward without dropout on a round's weights, and on to the next stage.

Used by stage/servicer. Nothing of it counts, and nothing is kept.
"""

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch

from swarm.errors import MalformedMessage, RoundMismatch
from swarm.hop.answers import HopListener
from swarm.hop.obstacle import Obstacle, pack_obstacle
from swarm.rpc.address import check_address
from swarm.rpc.callers import Caller
from swarm.rpc.channels import send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.boundary import HIDDEN, LOGITS, logits_spec, request_specs
from swarm.stage.incoming import Context, Incoming
from swarm.stage.stage import Stage
from swarm.stage.task_queue import Priority
from swarm.training import samples

PROGRESS_SECONDS = 1.0
"""Time between two signs of life to the caller."""


class Evaluation:
    """One stage's evaluations."""

    def __init__(self, stage: Stage) -> None:
        self._config = stage.context.config
        self._backend = stage.context.backend
        self._runtime = stage.context.runtime
        self._hop = stage.context.hop
        self._setting = stage.setting
        self._present_round = stage.present_round
        self._evaluating = asyncio.Lock()
        """One evaluation is at the compute thread, so that they take no place there from training."""
        self._turns: WeakValueDictionary[Caller, asyncio.Lock] = WeakValueDictionary()
        """One of each caller waits for that, so that the many of one keep no other waiting."""

    async def answer(self, context: Context, incoming: Incoming) -> tuple[dict[str, torch.Tensor], pb.Evaluated]:
        """Read a request and compute, here and at the next stages; gives the answer. Cancellation stops all of them.

        Raises:
            MalformedMessage, RoundMismatch, DeadlineExceeded; what the next stages raise.
        """
        opening: pb.EvaluateOpen | None = await incoming.opening()
        if opening is None:
            raise MalformedMessage("an evaluation begins with its open message")
        check_address(opening.address, run_id=self._config.run_id, stage=self._backend.stage)
        self._check_size(opening)
        specs = request_specs(self._config, self._backend.stage, opening.num_samples, opening.sequence_length)
        incoming.expect(specs, training=False)
        self._anchor(opening.round)
        tensors = await incoming.tensors()
        computed = asyncio.ensure_future(self._compute(incoming.caller, opening, tensors))
        output = await _with_progress(context, computed, _Awaited(self._backend.stage))
        if self._hop is not None:
            awaited = _Awaited(self._hop.stage)
            logits = logits_spec(self._config, opening.num_samples) if opening.want_logits else None
            inputs = {**samples.of(tensors), HIDDEN: output}
            downstream = asyncio.ensure_future(
                self._hop.evaluate(inputs, round_number=opening.round, logits=logits, listener=awaited)
            )
            output = await _with_progress(context, downstream, awaited)
        loss = 0.0 if opening.want_logits else float(output)
        evaluated = pb.Evaluated(loss=loss, num_targets=samples.amount(tensors).targets)
        return {LOGITS: output} if opening.want_logits else {}, evaluated

    def _check_size(self, opening: pb.EvaluateOpen) -> None:
        data = self._config.data
        if not (
            0 < opening.num_samples <= data.microbatch_size and 0 < opening.sequence_length <= data.sequence_length
        ):
            raise MalformedMessage(
                f"an evaluation has at most {data.microbatch_size} samples of {data.sequence_length} tokens, not "
                f"{opening.num_samples} of {opening.sequence_length}"
            )

    def _anchor(self, round_number: int) -> Mapping[str, torch.Tensor]:
        parameters = self._setting.anchor(round_number)
        if parameters is None:
            number = self._present_round.number
            raise RoundMismatch(f"round {round_number} is not kept, this peer is at {number}", peer_round=number)
        return parameters

    async def _compute(
        self, caller: Caller, opening: pb.EvaluateOpen, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        async with self._turns.setdefault(caller, asyncio.Lock()), self._evaluating:
            output, _ = await self._runtime.run(
                # The anchor not before: what waits must not keep a round's weights.
                lambda: self._backend.evaluate(
                    tensors, dict(self._anchor(opening.round)), want_logits=opening.want_logits
                ),
                # A forward among the others: behind all of them it would never have its turn at a bottleneck.
                priority=Priority.FORWARD,
                age=self._runtime.next_age(),
            )
            return output


class _Awaited(HopListener):
    """The deepest stage that an evaluation waits for, and why none of its peers takes work, if none does."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.obstacle: Obstacle | None = None

    def progress(self, stage: int, *, obstacle: Obstacle | None) -> None:
        self.stage, self.obstacle = stage, obstacle


async def _with_progress(context: Context, work: "asyncio.Future[Any]", awaited: _Awaited) -> Any:
    try:
        while not (await asyncio.wait([work], timeout=PROGRESS_SECONDS))[0]:
            progress = pb.Progress(stage=awaited.stage, obstacle=pack_obstacle(awaited.obstacle))
            await send(context, pb.EvaluateReply(progress=progress))
    finally:
        work.cancel()
    return work.result()
