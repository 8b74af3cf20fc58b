"""One stage's computation of one microbatch: forward, backward, loss, and taking a gradient out again.

Runs on the compute thread only; called by stage/computation. The network, queues and calls are not known here. Backward
uses the weights that forward used, whatever steps were taken in between. In float16 gradients are multiplied by a power
of two while they are computed; a gradient that is computed again is computed with the same factor.

A GPU works while this thread prepares the next task. For each microbatch the thread waits for the GPU once, before a
gradient is added to the sum. At the last stage it waits a second time, for the loss. stage/staging also waits, so that
the thread does not get too far ahead of the GPU. Every other check is made on the CPU, before tensors go to the GPU.

Shapes: B samples of a microbatch, T tokens, T1 = T + 1, D numbers a token that travel, V vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn

from swarm.config import RunConfig
from swarm.errors import MalformedMessage
from swarm.events.kinds import Accumulate, Events, RollBack
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import stage_loss, with_shared_casts
from swarm.rpc.wire import require_in_range
from swarm.stage.boundary import Boundary, boundary_of
from swarm.stage.buckets import Accumulated, GradientBucket, Source, Version
from swarm.stage.graphs import GraphBudget, are_finite, with_gradient
from swarm.stage.inputs import StageInputs, WireInputs
from swarm.stage.staging import Download, Staging
from swarm.stage.weights import StageWeights
from swarm.training import samples
from swarm.training.loss_scale import LossScale
from swarm.training.samples import NOTHING

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Forward:
    """A forward that waits for its gradient.

    Attributes:
        wire_inputs: the tensors that the stage received, on the CPU.
        wire_hidden: the encoded output for the next stage; None at the last stage.
        version: the weights that were used.
    """

    microbatch: int
    wire_inputs: WireInputs
    version: Version
    wire_hidden: Download | None = None
    _inputs: torch.Tensor | None = None
    _outputs: torch.Tensor | None = None


@dataclass
class StageBackend:
    """The computation of one stage."""

    config: RunConfig
    stage: int
    module: nn.Module
    weights: StageWeights
    staging: Staging
    budget: GraphBudget
    events: Events = field(default_factory=Events)
    _boundary: Boundary = field(init=False)
    _inputs: StageInputs = field(init=False)
    _scale: LossScale = field(init=False)

    def __post_init__(self) -> None:
        self._boundary = boundary_of(self.config)
        self._inputs = StageInputs(config=self.config, stage=self.stage, boundary=self._boundary, staging=self.staging)
        self._scale = LossScale.of_sums(self.config.model.autocast, self.config.data.tokens_per_microbatch)

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.config.stages.num_stages - 1

    # -- training ----------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: int, round_number: int, wire_inputs: WireInputs, *, has_backward: bool = True
    ) -> Forward:
        """Compute the stage's output, keeping the graph if the budget allows.

        Args:
            has_backward: whether `backward` or `release` will follow; if not, nothing is kept for them.

        Raises:
            MalformedMessage: the inputs hold numbers out of range, or an unknown token.
            NotReady: see StageWeights.version_for.
        """
        forward = Forward(
            microbatch=microbatch, wire_inputs=wire_inputs, version=self.weights.version_for(round_number)
        )
        self._inputs.check(wire_inputs)
        keeps_graph = has_backward and self.budget.has_room()
        if keeps_graph:
            forward._inputs, outputs = self._graph(forward)
        else:
            with torch.no_grad():
                outputs = self._apply(forward, self._inputs.hidden_or_tokens(wire_inputs))
        forward.wire_hidden = self._boundary.encode(outputs, self.staging)
        # Done last, because no caller releases a forward that failed.
        if keeps_graph:
            forward._outputs = outputs
            self.budget.keep()
        if has_backward:
            forward.version.taken()
        return forward

    def backward(
        self, forward: Forward, wire_gradient: torch.Tensor, *, accumulate: bool, only_at: int | None = None
    ) -> tuple[Download | None, Accumulated | None]:
        """Compute the gradient of the stage's input (None at stage 0). If wanted, add the gradient of the weights to
        the open bucket.

        The forward is released, whatever happens.

        Args, here and below:
            only_at: the stage that lacks the microbatch, for the record, if it is a replay.

        Raises:
            MalformedMessage: the gradient cannot be decoded, or the gradient of the weights is not finite.
        """
        try:
            if forward._outputs is None:
                forward._inputs, forward._outputs = self._graph(forward)
                self.budget.keep(recomputed=True)
            return self._collect(forward, wire_gradient, accumulate=accumulate, only_at=only_at)
        finally:
            self.release(forward)

    def forward_loss(
        self,
        microbatch: int,
        round_number: int,
        wire_inputs: WireInputs,
        *,
        accumulate: bool,
        only_at: int | None = None,
    ) -> tuple[float, Download | None, Accumulated | None]:
        """Compute forward, loss and backward of the last stage. Also returns the mean loss in nats per target.

        The gradients are those of the sum over the targets. Without any target they are 0, and so is the loss.

        Raises:
            MalformedMessage: inputs out of range, or a loss or gradient that is not finite.
            NotReady: see StageWeights.version_for.
        """
        self._inputs.check(wire_inputs)
        forward = Forward(
            microbatch=microbatch, wire_inputs=wire_inputs, version=self.weights.version_for(round_number)
        )
        forward.version.taken()
        try:
            forward._inputs, loss = self._graph(forward, self._scale.factor)
            forward._outputs = loss
            self.budget.keep()
            # Checked before the backward, so that a loss that is not finite has no effect.
            loss_on_cpu = loss.detach().cpu() / max(1, samples.amount(wire_inputs).targets)
            require_in_range("loss", loss_on_cpu)
            gradient, accumulated = self._collect(forward, None, accumulate=accumulate, only_at=only_at)
            return float(loss_on_cpu), gradient, accumulated
        finally:
            self.release(forward)

    def release(self, forward: Forward) -> None:
        """Forget a forward's graph and version, after its backward or because its gradient will never come."""
        if forward._outputs is not None:
            self.budget.let_go()
        forward._inputs = forward._outputs = None
        forward.version.left()
        self.weights.step_if_due()

    # -- what became of an accumulated gradient ------------------------------------------------------------------

    def settle(self, accumulated: Accumulated) -> None:
        """Note that a gradient is no longer tentative: it stays, or was taken out. No step need wait for it."""
        if not accumulated.settled:
            accumulated.settled = True
            accumulated.bucket.settled(accumulated.source)
            self.weights.step_if_due()

    def roll_back(self, all_accumulated: Sequence[Accumulated]) -> None:
        """Take gradients out of the sum.

        Each is computed again and subtracted. If fewer gradients stay than leave, the staying ones are computed again
        instead, and added to an empty sum.
        """
        leaving: dict[GradientBucket, dict[Source, None]] = {}
        for accumulated in all_accumulated:
            leaving.setdefault(accumulated.bucket, {})[accumulated.source] = None
        for bucket, sources in leaving.items():
            self._take_out(bucket, sources.keys())
        for accumulated in all_accumulated:
            source, bucket = accumulated.source, accumulated.bucket
            bucket.withdrawn(source)
            undone = RollBack(microbatch=source.microbatch, samples=source.amount.samples, bucket=bucket.number)
            self.events.write(undone)
            self.settle(accumulated)

    def _take_out(self, bucket: GradientBucket, leaving: Set[Source]) -> None:
        staying = [source for source in bucket.sources if source not in leaving]
        left, kept = (sum((source.amount for source in some), start=NOTHING) for some in (leaving, staying))
        # With DiLoCo `sources` is empty, so the staying gradients are not known: a sum is made anew only if nothing
        # stays.
        if len(staying) < len(leaving) and left + kept == bucket.amount:
            bucket.clear(kept)
            for source in staying:
                bucket.add(self._again(source), source.amount, scale=source.scale, is_counted=True)
        else:
            for source in leaving:
                bucket.take_out(self._again(source), source.amount, scale=source.scale)

    def _again(self, source: Source) -> Sequence[torch.Tensor]:
        """Compute a gradient again, times source.scale, with the same weights and randomness."""
        forward = Forward(microbatch=source.microbatch, wire_inputs=source.wire_inputs, version=source.version)
        _, forward._outputs = self._graph(forward, source.scale)
        root = self._root(forward, source.wire_gradient, source.scale)
        parameters = list(source.version.parameters.values())
        return torch.autograd.grad(root, parameters, allow_unused=True, materialize_grads=True)

    def warm_up(self) -> None:
        """Compute a gradient and an evaluation of made-up samples, so that what is compiled at a first call is there.

        Nothing of it is kept. If layers are compiled, torch may raise errors of many kinds.
        """
        wire_inputs, wire_gradient = self._inputs.made_up()
        made_up = Source(
            microbatch=0, amount=NOTHING, wire_inputs=wire_inputs, version=self.weights.version,
            wire_gradient=None if self.is_last else wire_gradient,
        )  # fmt: skip
        self._again(made_up)
        self.evaluate(wire_inputs, self.weights.version.parameters)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, wire_inputs: WireInputs, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute a forward without dropout, with the given weights (usually an anchor) on the stage's device.

        Returns:
            The encoded hidden state for the next stage. At the last stage it is the mean loss over the targets, a
            scalar, which is 0 without targets.
        """
        self._inputs.check(wire_inputs)
        inputs = self._inputs.hidden_or_tokens(wire_inputs)
        with torch.no_grad():
            outputs = self._call(parameters, inputs, wire_inputs, None)
            if not self.is_last:
                return self._boundary.encode(outputs, self.staging).wait()
            return outputs.cpu() / max(1, samples.amount(wire_inputs).targets)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _graph(self, forward: Forward, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._inputs.hidden_or_tokens(forward.wire_inputs)
        if self.stage:
            inputs.requires_grad_()
        with torch.enable_grad():
            outputs = self.budget.build(lambda: self._apply(forward, inputs, scale), forward.version)
        return inputs, outputs

    def _apply(self, forward: Forward, inputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        key = DropoutKey(seed=self.config.data.seed, microbatch=forward.microbatch)
        parameters = with_shared_casts(self.module, forward.version.parameters, forward.version.casts)
        return self._call(parameters, inputs, forward.wire_inputs, key, scale)

    def _call(
        self,
        parameters: Mapping[str, torch.Tensor],
        inputs: torch.Tensor,
        wire_inputs: WireInputs,
        key: DropoutKey | None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """The hidden state for the next stage; at the last one the loss in nats, summed over the targets, whose
        gradients are those of `scale` times the loss."""
        options = {"dropout_key": key, **self._inputs.context(wire_inputs)}
        if self.is_last:
            targets_BT = self._inputs.targets(wire_inputs)
            return stage_loss(self.module, parameters, inputs, targets_BT, gradient_scale=scale, **options)
        outputs: torch.Tensor = torch.func.functional_call(self.module, dict(parameters), (inputs,), options)
        return outputs

    def _collect(
        self,
        forward: Forward,
        wire_gradient: torch.Tensor | None,
        *,
        accumulate: bool,
        only_at: int | None,
    ) -> tuple[Download | None, Accumulated | None]:
        parameters = list(forward.version.parameters.values()) if accumulate else []
        if not self.stage and not parameters:
            return None, None
        gradients, scale = self._gradients(forward, wire_gradient, parameters)
        answer = None
        if self.stage:
            input_gradient, *gradients = gradients
            answer = self._boundary.encode(input_gradient if scale == 1.0 else input_gradient / scale, self.staging)
        if not accumulate:
            return answer, None
        # Waits for the device, because a gradient that is not finite could not be taken out of the sum again.
        if self._scale.is_fixed and not are_finite(gradients):
            raise MalformedMessage("the gradient of the weights is not finite")
        source = Source(
            microbatch=forward.microbatch, amount=samples.amount(forward.wire_inputs), wire_inputs=forward.wire_inputs,
            wire_gradient=wire_gradient, version=forward.version, scale=scale,
        )  # fmt: skip
        bucket = self.weights.accumulate(gradients, source)
        taken = Accumulate(
            microbatch=source.microbatch, samples=source.amount.samples, bucket=bucket.number, only_at=only_at
        )
        self.events.write(taken)
        return answer, Accumulated(source=source, bucket=bucket)

    def _gradients(
        self, forward: Forward, wire_gradient: torch.Tensor | None, parameters: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], float]:
        """The gradients of the inputs (not at stage 0) and of the parameters times a power of two, and this factor.

        With a factor that is not fixed they are finite, or MalformedMessage is raised: no factor makes them so.
        """
        while True:
            scale = self._scale.factor
            assert forward._outputs is not None
            inputs = [] if not self.stage or forward._inputs is None else [forward._inputs]
            root = self._root(forward, wire_gradient, scale)
            gradients = torch.autograd.grad(root, [*inputs, *parameters], allow_unused=True, materialize_grads=True)
            if self._scale.is_fixed or are_finite(gradients):
                self._scale.succeeded()
                return gradients, scale
            if not self._scale.halve():
                raise MalformedMessage("the gradient is not finite, whatever its scale")
            logger.info("microbatch %d overflows float16: computed again with half the scale", forward.microbatch)
            del root, gradients
            forward._inputs, forward._outputs = self._graph(forward, self._scale.factor)

    def _root(self, forward: Forward, wire_gradient: torch.Tensor | None, scale: float) -> torch.Tensor:
        """The scalar whose gradients are those of the loss times `scale`. At the last stage its graph has the scale."""
        assert forward._outputs is not None
        if wire_gradient is None:
            return forward._outputs
        gradient_BTD = self._inputs.decode(wire_gradient, forward.wire_inputs)
        return with_gradient(forward._outputs, gradient_BTD if scale == 1.0 else gradient_BTD * scale)
