"""Decides how a stage peer answers a call for a microbatch, which may be new or known here.

A microbatch never counts twice: every accumulation goes through the ledger here. stage/admission decides which
microbatches are taken, stage/endings how computations end, and stage/settings everything that depends on the setting.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path

import torch
from torch import nn

from swarm.config import RunConfig, Timeline
from swarm.errors import NotReady
from swarm.events import Events, Repeat
from swarm.model.functions import fuses
from swarm.stage.admission import Admission
from swarm.stage.computation import Computation, Order
from swarm.stage.context import StageContext
from swarm.stage.endings import Endings
from swarm.stage.held_rounds import MAX_ROUNDS_EACH, MAX_ROUNDS_OF_USER, HeldRounds
from swarm.stage.settings.diloco import DilocoSetting
from swarm.stage.settings.diloco_weights import DilocoWeights
from swarm.stage.settings.setting import Setting, Start
from swarm.stage.settings.synchronous import SynchronousSetting, SynchronousWeights
from swarm.stage.weights import StageWeights
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId


class Stage:
    """Answers microbatches, new and known ones.

    Attributes:
        admission: decides which microbatches are taken.
        endings: ends the computations that were begun.
        held_rounds: weights that texts and evaluations compute with.
    """

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.present_round = context.present_round
        self.setting = setting_of(context)
        self.ledger = context.records.ledger
        self.counters = context.records.counters
        self.answers = context.records.answers
        self.admission = Admission(context, self.setting)
        self.endings = Endings(context, self.setting)
        max_each = MAX_ROUNDS_OF_USER if context.stage == 0 else MAX_ROUNDS_EACH
        self.held_rounds = HeldRounds(context.backend.weights.anchor, lambda: context.present_round.number, max_each)
        self._is_changing_state = False
        """Whether another state is about to be installed, so that nothing is accumulated in the present one."""

    @property
    def block(self) -> Block:
        return self.context.block

    @property
    def number(self) -> int:
        return self.context.stage

    @property
    def round(self) -> int:
        return self.present_round.number

    @property
    def is_closed(self) -> bool:
        """Whether this round's contribution was handed out. Then new gradients count for the next round, or wait."""
        return self.context.backend.weights.round.closed

    @property
    def stands_still(self) -> bool:
        """Whether training waits here until the round is committed."""
        return self.is_closed and (not self.setting.takes_gradients or self.setting.num_waiting > 0)

    @property
    def seconds_per_sample(self) -> float:
        """The time of the compute thread, for forward and backward together; 0 before the first microbatch."""
        return self.context.records.seconds_per_sample.value or 0.0

    @property
    def is_busy(self) -> bool:
        """Whether this peer has microbatches under way that would be lost with it, or acknowledgements to pass on."""
        return self.admission.num_admitted > 0 or self.answers.are_under_way

    # -- for calls ---------------------------------------------------------------------------------------------------

    def known_inputs(self, microbatch: Microbatch) -> Mapping[str, torch.Tensor] | None:
        """The tensors of a microbatch, if this peer has them already."""
        known = self.setting.known(microbatch)
        return None if known is None else known.order.wire_inputs

    def begin(
        self, microbatch: Microbatch, tensors: Mapping[str, torch.Tensor], hints: Mapping[Block, PeerId],
        subscriber: object,
    ) -> Computation:  # fmt: skip
        """Begin the computation that answers a microbatch, or join a known one, once its round has begun here
        (Setting.due_round). `subscriber` gets the answer.

        Args:
            hints: which peers of later stages know the microbatch already.

        Raises:
            MalformedMessage, StaleMicrobatch, NotReady.
        """
        self.setting.require_of_its_round(microbatch)
        answer = self._answer_to(microbatch)
        if isinstance(answer, Computation):
            answer.subscribe(subscriber)
            return answer
        if answer.instead_of is not None:
            answer.instead_of.subscribe(subscriber)
            self.endings.discard(answer.instead_of)
        computation = self._start(answer, tensors, hints, microbatch.answers_gradient(self.number))
        computation.subscribe(subscriber)
        computation.start(self.context.tasks)
        return computation

    def _answer_to(self, microbatch: Microbatch) -> Computation | Start:
        if not self.setting.counts(microbatch):
            known = self.setting.known(microbatch)
            earlier = known if known is not None and known.done else None
            return Start(microbatch=microbatch, accumulate=False, earlier=earlier)
        entry = self.ledger.find(microbatch.index)
        if entry is None:
            return Start(microbatch=microbatch, accumulate=True)
        self.counters["repeated"] += 1
        self.context.events.write(Repeat(microbatch=microbatch.index, state=entry.state))
        return self.setting.repeated(microbatch, entry)

    def _start(
        self, start: Start, tensors: Mapping[str, torch.Tensor], hints: Mapping[Block, PeerId], answers_gradient: bool
    ) -> Computation:
        if start.accumulate and self._is_changing_state:
            raise NotReady("this peer takes over another state")
        microbatch, context = start.microbatch, self.context
        accumulate = start.accumulate and self.setting.takes_gradients
        if start.earlier is not None:
            # The caller's hints count more, because it may know of a later replay.
            hints = microbatch.known_by({**start.earlier.result().route, **hints})
        order = Order(
            microbatch=microbatch, wire_inputs=tensors, accumulate=accumulate, answers_gradient=answers_gradient,
            age=context.runtime.age_of(microbatch.index), hints=hints, adopts=start.adopts, earlier=start.earlier,
        )  # fmt: skip
        computation = Computation(
            order,
            backend=context.backend,
            runtime=context.runtime,
            hop=context.hop_on(context.config.path_of(microbatch.index)),
            # Without accumulation the gradient goes into no step, so the forward waits for none.
            turn=self.setting.turn(order.age) if accumulate else contextlib.nullcontext(),
            # This must not refer to the computation: the reference cycle would keep it and its tensors in memory until
            # Python collects cycles.
            on_accumulated=lambda: self._accumulated(microbatch, accumulate=accumulate),
        )
        if accumulate:
            self.ledger.begin(microbatch.index, microbatch.round, computation)
        if start.adopts is not None:
            start.adopts.subscribe(computation)
        self.counters["forwards"] += computation.has_forward
        return computation

    def _accumulated(self, microbatch: Microbatch, *, accumulate: bool) -> None:
        self.counters["backwards"] += 1
        self.admission.had_memory()
        if accumulate:
            self.ledger.accumulated(microbatch.index)

    # -- for the group's member --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def changing_state(self) -> AsyncIterator[None]:
        """Undo all that is unfinished and forget the rest, so that the block can install another state."""
        self._is_changing_state = True
        try:
            await self.endings.discard_all(self.ledger.uncommitted())
            self.ledger.prune(self.round + 1)
            yield
        finally:
            self._is_changing_state = False

    # -- for the program ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Admit nothing from now on, and wait for no retries."""
        self.admission.close()
        self.endings.end()


def weights_of(
    config: RunConfig, module: nn.Module, *, lineage: str, events: Events | None = None, fused: bool | None = None,
    anchors: Path | None = None, share: Fraction = Fraction(1), timeline: Timeline | None = None,
) -> StageWeights:  # fmt: skip
    """Make a stage's weights: the module's own, at round 0.

    Args:
        fused: whether steps are taken in few launches, for a GPU; None: as functions.fuses says.
        anchors: the folder on whose disk DiLoCo's anchors and outer momentum are; None: they are in RAM.
        share: how many of the run's samples pass through the block. The learning rate follows the run's samples.
        timeline: the run's, whose configuration may differ from this one in how the stage computes; None: a new one.

    Raises:
        OSError: that disk has no room.
        ValueError: the stage has fewer layer groups than the configuration has fragments.
    """
    timeline = timeline or Timeline(config)
    fused = fuses(next(module.parameters()).device) if fused is None else fused
    if config.rounds.synchronous:
        return SynchronousWeights(config, module, timeline, lineage=lineage, share=share, fused=fused)
    return DilocoWeights(
        config, module, timeline, lineage=lineage, events=events, fused=fused, anchors=anchors, share=share
    )


def setting_of(context: StageContext) -> Setting:
    weights = context.backend.weights
    if isinstance(weights, SynchronousWeights):
        return SynchronousSetting(context, weights)
    assert isinstance(weights, DilocoWeights), "there are two settings"
    return DilocoSetting(context, weights)
