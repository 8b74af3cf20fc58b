"""Evaluation of held-out text at one stage: a forward without dropout on a round's weights, and on to the next stage.

Only a round's weights are kept, for as long as a caller holds them.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch

from swarm.errors import MalformedMessage, NotReady
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.rpc.callers import Caller, caller_of
from swarm.rpc.serving import Context, check_address, send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.boundary import HIDDEN, request_specs
from swarm.stage.call import Incoming, with_progress
from swarm.stage.held_rounds import ROUND_SECONDS
from swarm.stage.runtime import Priority
from swarm.stage.stage import Stage
from swarm.training import samples

LONGEST_HOLD_SECONDS = 1800.0
"""The longest time for which a caller may hold a round."""


class Evaluation:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._config = stage.context.config
        self._backend = stage.context.backend
        self._device = stage.context.backend.weights.device
        self._runtime = stage.context.runtime
        self._evaluating = asyncio.Lock()
        """Held by the one evaluation that is queued at the compute thread, so that evaluations take little of its time
        from training."""
        self._turns: WeakValueDictionary[Caller, asyncio.Lock] = WeakValueDictionary()
        """A lock for each caller, held by the one of its evaluations that waits for `_evaluating`: a caller with many
        evaluations delays no other caller."""

    # -- a round's weights ---------------------------------------------------------------------------------------------

    async def hold(self, context: Context, request: pb.HoldRequest) -> None:
        """Hold a round, here and at the next stages, until this is cancelled. Raises RoundMismatch or Overloaded if the
        round cannot be held here, NotReady if it has not begun here, or was held for as long as it may be, and what the
        next stages raise."""
        check_address(request.address, run_id=self._config.run_id, block=self._stage.block)
        hop = self._stage.context.hop_on(request.address.path)
        if not self._stage.admission.is_open:
            raise NotReady("this peer is joining or leaving")
        number = request.newest_round
        if not self._config.rounds.synchronous:
            number = min(number, self._stage.round)
        await self._stage.present_round.wait_for(number, ROUND_SECONDS)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stage.held_rounds.held(number, caller_of(context), linger_seconds=0.0))
            held = pb.Held(round=number)
            if hop is not None:
                awaited = HopListener(hop.block.stage)
                opening = asyncio.ensure_future(hop.hold(request.newest_round, awaited, path=request.address.path))
                later = await with_progress(context, opening, awaited, pb.HoldReply)
                stack.callback(later.close)
                held.later.extend(later.held)
            await send(context, pb.HoldReply(held=held))
            await asyncio.sleep(LONGEST_HOLD_SECONDS)
        raise NotReady(f"a round is held for {LONGEST_HOLD_SECONDS:.0f} s, and not longer")

    # -- microbatches --------------------------------------------------------------------------------------------------

    async def answer(self, context: Context, incoming: Incoming) -> pb.Evaluated:
        """Read a request, compute it here and at the next stages, and return the answer. Cancellation stops all stages.

        Raises:
            MalformedMessage, RoundMismatch, DeadlineExceeded; what the next stages raise.
        """
        opening: pb.EvaluateOpen | None = await incoming.opening()
        if opening is None:
            raise MalformedMessage("an evaluation begins with its open message")
        check_address(opening.address, run_id=self._config.run_id, block=self._stage.block)
        hop = self._stage.context.hop_on(opening.address.path)
        self._check(opening)
        config = self._stage.context.config_in(opening.round)
        specs = request_specs(config, self._backend.stage, opening.num_samples, opening.sequence_length)
        incoming.expect(specs, training=False)
        self._stage.held_rounds.find(opening.round)
        tensors = await incoming.tensors()
        computed = asyncio.ensure_future(self._compute(incoming.caller, opening, tensors))
        output = await with_progress(context, computed, HopListener(self._backend.stage), pb.EvaluateReply)
        loss = output if hop is None else await self._at_next(hop, context, opening, tensors, output)
        return pb.Evaluated(loss=float(loss), num_targets=samples.amount(tensors).targets)

    async def _at_next(
        self, hop: Hop, context: Context, opening: pb.EvaluateOpen, tensors: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
    ) -> float:  # fmt: skip
        awaited, inputs = HopListener(hop.block.stage), {**samples.of(tensors), HIDDEN: hidden}
        downstream = asyncio.ensure_future(hop.evaluate(inputs, opening.later, awaited, path=opening.address.path))
        loss: float = await with_progress(context, downstream, awaited, pb.EvaluateReply)
        return loss

    def _check(self, opening: pb.EvaluateOpen) -> None:
        data = self._config.data
        if not (
            0 < opening.num_samples <= data.microbatch_size and 0 < opening.sequence_length <= data.sequence_length
        ):
            raise MalformedMessage(
                f"an evaluation has at most {data.microbatch_size} samples of {data.sequence_length} tokens, not "
                f"{opening.num_samples} of {opening.sequence_length}"
            )
        num_later = self._config.stages.num_stages - self._backend.stage - 1
        if len(opening.later) != num_later:
            raise MalformedMessage(f"an evaluation here names the rounds of {num_later} later stages")

    async def _compute(
        self, caller: Caller, opening: pb.EvaluateOpen, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        async with self._turns.setdefault(caller, asyncio.Lock()), self._evaluating:
            next_round = opening.later[0].round if opening.later else opening.round
            boundary = self._backend.boundary_in(opening.round)
            output, _ = await self._runtime.run(
                # The weights are looked up only now, because an evaluation that waits must not keep a round's weights.
                lambda: self._backend.evaluate(
                    tensors, boundary, self._stage.held_rounds.find(opening.round).on(self._device), next_round
                ),
                # It has the age of a new forward: at a lower priority it would never have a turn at a bottleneck.
                priority=Priority.FORWARD,
                age=self._runtime.next_age(),
            )
            return output
