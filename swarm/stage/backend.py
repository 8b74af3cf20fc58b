"""One stage's computation of one microbatch: forward, backward, loss, and taking a gradient out again.

Runs on the compute thread only. Backward uses the weights that forward used, whatever steps were taken in between. In
float16 gradients are multiplied by a power of two while they are computed; a gradient that is computed again is
computed with the same factor.

A GPU works while this thread prepares the next task. For each microbatch the thread waits for the GPU once, before a
gradient is added to the sum; at the last stage the loss is read then, too. stage/staging also waits, so that the thread
does not get too far ahead of the GPU. Every other check is made on the CPU, before tensors go to the GPU.

Shapes: B samples of a microbatch, T tokens, T1 = T + 1, D numbers a token that travel, V vocabulary.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from swarm.config import RunConfig
from swarm.errors import MalformedMessage
from swarm.events import Accumulate, Events, RollBack
from swarm.machine.recording import Recorder
from swarm.rpc.wire import require_in_range
from swarm.stage.boundary import Boundary, boundary_of
from swarm.stage.buckets import Accumulated, GradientBucket, Inputs, Source
from swarm.stage.function import StageFunction, WireInputs
from swarm.stage.graphs import Graph, GraphBudget
from swarm.stage.staging import Download, Staging
from swarm.stage.weights import StageWeights
from swarm.training import samples
from swarm.training.samples import NOTHING
from swarm.training.scaling import LossScale, read_back

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Forward:
    """A forward that waits for its gradient.

    Attributes:
        wire_hidden: the encoded output for the next stage; None at the last stage.
    """

    inputs: Inputs
    wire_hidden: Download | None = None
    _graph: Graph | None = None


class Again(NamedTuple):
    """What a microbatch gives when it is computed again: see `forward_loss` and `forward`, and StageWeights.sketch."""

    loss: float
    hidden: Download | None
    gradient: Download | None
    sketch: Download


@dataclass
class StageBackend:
    """The `recorder` records the computation in `warm_up`, and the decoder's steps, if they can be recorded; None:
    nothing is recorded."""

    config: RunConfig
    stage: int
    module: nn.Module
    weights: StageWeights
    staging: Staging
    budget: GraphBudget
    events: Events = field(default_factory=Events)
    recorder: Recorder | None = None
    function: StageFunction = field(init=False)
    _scale: LossScale = field(init=False)

    def __post_init__(self) -> None:
        boundary = boundary_of(self.config)
        self.function = StageFunction(self.config, self.stage, self.module, boundary, self.staging, self.budget)
        self._scale = LossScale.of_sums(self.config.model.autocast, self.config.data.tokens_per_microbatch)

    @property
    def is_last(self) -> bool:
        return self.function.is_last

    # -- training ----------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: int, round_number: int, wire_inputs: WireInputs, *, has_backward: bool = True
    ) -> Forward:
        """Compute the stage's output, keeping the graph if the budget allows.

        Args:
            has_backward: whether `backward` or `release` will follow; if not, nothing is kept for them.
            wire_inputs: here and below, StageFunction.checked has found no fault with them.

        Raises NotReady, see StageWeights.version_for.
        """
        forward = Forward(self._inputs(microbatch, round_number, wire_inputs))
        outputs, graph = self.function.forward(forward.inputs, has_backward=has_backward)
        try:
            forward.wire_hidden = forward.inputs.boundary.encode(outputs, self.staging)
        except BaseException:
            # No caller releases a forward that failed.
            if graph is not None:
                graph.let_go()
            raise
        if graph is not None:
            forward._graph = graph
            self.budget.keep()
        if has_backward:
            forward.inputs.version.taken()
        return forward

    def backward(
        self, forward: Forward, wire_gradient: torch.Tensor, *, accumulate: bool, only_at: int | None = None
    ) -> tuple[Download | None, Accumulated | None]:
        """Compute the gradient of the stage's input (None at stage 0). If wanted, add the gradient of the weights to
        the open bucket.

        The forward is released, whatever happens.

        `only_at` is the stage that lacks the microbatch, for the record, if it is a replay, here and below.

        Raises:
            MalformedMessage: the gradient cannot be decoded, or the gradient of the weights is not finite.
        """
        try:
            if forward._graph is None:
                self._compute(forward, recomputed=True)
            _, answer, accumulated = self._collect(forward, wire_gradient, accumulate=accumulate, only_at=only_at)
            return answer, accumulated
        finally:
            self.release(forward)

    def forward_loss(
        self, microbatch: int, round_number: int, wire_inputs: WireInputs,
        *, accumulate: bool, only_at: int | None = None,
    ) -> tuple[float, Download | None, Accumulated | None]:  # fmt: skip
        """Compute forward, loss and backward of the last stage. Also returns the mean loss in nats per target.

        The gradients are those of the sum over the targets. Without any target they are 0, and so is the loss.

        Raises:
            MalformedMessage: a loss or gradient that is not finite.
            NotReady: see StageWeights.version_for.
        """
        with self._at_once(self._inputs(microbatch, round_number, wire_inputs)) as forward:
            return self._collect(forward, None, accumulate=accumulate, only_at=only_at)

    def compute_again(
        self, microbatch: int, round_number: int, wire_inputs: WireInputs, wire_gradient: torch.Tensor | None,
        *, at_anchor: bool = False,
    ) -> Again:  # fmt: skip
        """Compute what another peer says it has computed, and add it to no sum. `wire_gradient` is that of the output,
        as the other peer got it; None at the last stage. `at_anchor`: with the weights that began the round. Checks the
        inputs. Raises what `forward_loss` and `backward` do."""
        boundary, is_sketched = self.boundary_in(round_number), self.weights.sketch is not None
        self.function.check(wire_inputs, boundary)
        version = (self.weights.anchored if at_anchor else self.weights.version_for)(round_number)
        inputs = Inputs(microbatch=microbatch, wire_inputs=wire_inputs, boundary=boundary, version=version)
        with self._at_once(inputs) as forward:
            assert forward._graph is not None
            hidden = None if self.is_last else boundary.encode(forward._graph.outputs, self.staging)
            loss, gradient, _, _, sketch = self._differentiate(forward, wire_gradient, of_weights=is_sketched)
            return Again(loss, hidden, gradient, sketch)

    @contextmanager
    def _at_once(self, inputs: Inputs) -> Iterator[Forward]:
        """A forward whose backward follows in the block; afterwards it is released."""
        forward = Forward(inputs)
        inputs.version.taken()
        try:
            self._compute(forward)
            yield forward
        finally:
            self.release(forward)

    def _inputs(self, microbatch: int, number: int, wire_inputs: WireInputs) -> Inputs:
        version, boundary = self.weights.version_for(number), self.boundary_in(number)
        return Inputs(microbatch=microbatch, wire_inputs=wire_inputs, boundary=boundary, version=version)

    def boundary_in(self, round_number: int) -> Boundary:
        """How hidden states and gradients of a round's microbatches travel."""
        return boundary_of(self.weights.timeline.at(round_number))

    def release(self, forward: Forward) -> None:
        """Forget a forward's graph and version, after its backward or because its gradient will never come."""
        self._let_go(forward)
        forward.inputs.version.left()
        self.weights.step_if_due()

    def _let_go(self, forward: Forward) -> None:
        if forward._graph is not None:
            forward._graph.let_go()
            self.budget.let_go()
            forward._graph = None

    # -- what became of an accumulated gradient ------------------------------------------------------------------

    def settle(self, accumulated: Accumulated) -> None:
        """Note that a gradient is no longer tentative: it stays, or was taken out. No step need wait for it."""
        if not accumulated.settled:
            accumulated.settled = True
            accumulated.bucket.settled(accumulated.source)
            self.weights.step_if_due()

    def roll_back(self, all_accumulated: Sequence[Accumulated]) -> None:
        """Take gradients out of their sums; see GradientBucket.roll_back."""
        leaving: dict[GradientBucket, dict[Source, None]] = {}
        for accumulated in all_accumulated:
            leaving.setdefault(accumulated.bucket, {})[accumulated.source] = None
        for bucket, sources in leaving.items():
            bucket.roll_back(sources.keys(), self._again)
        for accumulated in all_accumulated:
            source, bucket = accumulated.source, accumulated.bucket
            bucket.withdrawn(source)
            undone = RollBack(microbatch=source.microbatch, samples=source.amount.samples, bucket=bucket.number)
            self.events.write(undone)
            self.settle(accumulated)

    def _again(self, source: Source) -> Sequence[torch.Tensor]:
        """Compute a gradient again, times source.scale, by the same operations, weights and randomness."""
        graph = self.function.graph(source, source.scale, records=source.is_recorded)
        gradient_BTR = self._scaled(source.wire_gradient, source, source.scale)
        return graph.gradients(gradient_BTR, of_inputs=False)

    def warm_up(self) -> None:
        """Compute a gradient and an evaluation of made-up samples, so that what is compiled at a first call is there,
        and record what can be recorded. Nothing else is kept. Torch may raise errors of many kinds."""
        (wire_inputs, wire_gradient), version = self.function.made_up(0), self.weights.version
        made_up = Source(
            microbatch=0, amount=NOTHING, wire_inputs=wire_inputs, boundary=self.function.boundary, version=version,
            wire_gradient=None if self.is_last else wire_gradient,
        )  # fmt: skip
        self._again(made_up)
        self.evaluate(wire_inputs, made_up.boundary, version.parameters)
        if not self.is_last:
            # So it is where there is no room for a graph.
            self.function.forward(made_up, has_backward=False)
        if self.recorder is not None:
            self.function.record(self.recorder, version)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(
        self, wire_inputs: WireInputs, boundary: Boundary, parameters: Mapping[str, torch.Tensor], next_round: int = 0
    ) -> torch.Tensor:
        """Compute a forward without dropout, with the given weights (usually an anchor) on the stage's device.
        `boundary` is that of the inputs' round, and `next_round` the round that the next stage evaluates.

        Returns:
            The encoded hidden state for the next stage. At the last stage the mean loss over the targets, or 0.
        """
        self.function.check(wire_inputs, boundary)
        outputs = self.function.evaluate(parameters, wire_inputs, boundary)
        if not self.is_last:
            return self.boundary_in(next_round).encode(outputs, self.staging).wait()
        return outputs.cpu() / max(1, samples.amount(wire_inputs).targets)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _compute(self, forward: Forward, *, recomputed: bool = False) -> None:
        """Compute a forward whose backward follows at once; `recomputed`: because there was no room for its graph."""
        forward._graph = self.function.graph(forward.inputs, self._scale.factor)
        self.budget.keep(recomputed=recomputed)

    def _collect(
        self, forward: Forward, wire_gradient: torch.Tensor | None, *, accumulate: bool, only_at: int | None
    ) -> tuple[float, Download | None, Accumulated | None]:
        """Compute the gradients, and use them. Also returns the last stage's mean loss; at others it is 0."""
        mean_loss, answer, gradients, scale, sketch = self._differentiate(forward, wire_gradient, of_weights=accumulate)
        if not accumulate:
            return mean_loss, answer, None
        assert forward._graph is not None
        amount = samples.amount(forward.inputs.wire_inputs)
        source = Source(
            **vars(forward.inputs), amount=amount, wire_gradient=wire_gradient, scale=scale,
            is_recorded=forward._graph.is_recorded,
        )  # fmt: skip
        bucket = self.weights.accumulate(gradients, source)
        self.events.write(
            Accumulate(microbatch=source.microbatch, samples=amount.samples, bucket=bucket.number, only_at=only_at)
        )
        return mean_loss, answer, Accumulated(source=source, bucket=bucket, sketch=sketch)

    def _differentiate(
        self, forward: Forward, wire_gradient: torch.Tensor | None, *, of_weights: bool
    ) -> tuple[float, Download | None, list[torch.Tensor], float, Download]:
        """The last stage's mean loss (0 at others), the encoded gradient of the inputs (None at stage 0), finite
        gradients of the parameters, if wanted, times a power of two, this factor, and their sketch, if there is any."""
        while True:
            graph, scale, answer = forward._graph, self._scale.factor, None
            assert graph is not None
            gradients = list[torch.Tensor]()
            if self.stage or of_weights:
                gradient_BTR = self._scaled(wire_gradient, forward.inputs, scale)
                gradients = graph.gradients(gradient_BTR, of_inputs=self.stage > 0, of_weights=of_weights)
            to_check = gradients
            if self.stage:
                input_gradient, *gradients = gradients
                unscaled = input_gradient if scale == 1.0 else input_gradient / scale
                answer = forward.inputs.boundary.encode(unscaled, self.staging)
            # Queued before the wait, so that the device has no gap after it.
            sketch = self._sketch_of(gradients, scale) if of_weights else None
            # Waits for the device, because a gradient that is not finite could not be taken out of the sum again. The
            # next stage checks that of the inputs; with a factor it is checked here, since another factor may mend it.
            loss, are_finite = read_back(
                graph.outputs if self.is_last else None, gradients if self._scale.is_fixed else to_check
            )
            mean_loss = loss / max(1, samples.amount(forward.inputs.wire_inputs).targets)
            require_in_range("loss", mean_loss, "fp32")
            if are_finite:
                self._scale.succeeded()
                sent = Download(torch.empty(0)) if sketch is None else self.staging.download(sketch)
                return float(mean_loss), answer, gradients, scale, sent
            if not self._scale.halve():
                whose, why = (" of the weights", "") if self._scale.is_fixed else ("", ", whatever its scale")
                raise MalformedMessage(f"the gradient{whose} is not finite{why}")
            number = forward.inputs.microbatch
            logger.info("microbatch %d overflows float16: computed again with half the scale", number)
            # The forward comes again, too: a backward may use up what its forward has kept.
            del graph, gradients, to_check, sketch
            self._let_go(forward)
            self._compute(forward)

    def _sketch_of(self, gradients: Sequence[torch.Tensor], scale: float) -> torch.Tensor | None:
        if (sketch := self.weights.sketch) is None:
            return None
        sketch_N = sketch.of(dict(zip(self.weights.masters, gradients, strict=True)))
        return sketch_N if scale == 1.0 else sketch_N / scale

    def _scaled(self, wire_gradient: torch.Tensor | None, of: Inputs, scale: float) -> torch.Tensor | None:
        """The gradient of the stage's output times the scale; None at the last stage, whose graph has the scale."""
        if wire_gradient is None:
            return None
        gradient_BTR = self.function.decode(wire_gradient, of.wire_inputs, of.boundary)
        return gradient_BTR if scale == 1.0 else gradient_BTR * scale
