"""A stage peer's mind: which microbatches it knows, and what a call gets for one.

Between the servicer, which speaks gRPC, and the compute thread. Keeps the promise that a microbatch never counts twice:
every accumulation goes through the ledger here. What is taken at all is decided in stage/admission, how computations
end in stage/endings, and what depends on the setting in stage/setting. Runs on the event loop; never computes.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager

import torch

from swarm.errors import NotReady
from swarm.events.kinds import Repeat
from swarm.stage.admission import Admission
from swarm.stage.computation import Computation, Order
from swarm.stage.context import StageContext
from swarm.stage.endings import Endings
from swarm.stage.held_rounds import HeldRounds
from swarm.stage.present_round import PresentRound
from swarm.stage.records import Records
from swarm.stage.setting import Setting, Start
from swarm.stage.settings import setting_of
from swarm.training.microbatch import Microbatch
from swarm.types import PeerId


class Stage:
    """Answers microbatches, new and known ones.

    Attributes:
        admission: decides which are taken.
        endings: what becomes of those that were begun.
        held_rounds: weights that texts and evaluations compute with.
    """

    def __init__(
        self,
        context: StageContext,
        *,
        setting: Setting,
        present_round: PresentRound,
        records: Records,
        admission: Admission,
        endings: Endings,
        held_rounds: HeldRounds,
    ) -> None:
        self.context = context
        self.setting = setting
        self.present_round = present_round
        self.ledger = records.ledger
        self.counters = records.counters
        self.answers = records.answers
        self._seconds_per_sample = records.seconds_per_sample
        self.admission = admission
        self.endings = endings
        self.held_rounds = held_rounds
        self._is_changing_state = False
        """Whether another state is about to be installed: nothing is accumulated in the one that goes."""

    @property
    def number(self) -> int:
        """The number of the stage."""
        return self.context.stage

    @property
    def round(self) -> int:
        """The round that is being worked on."""
        return self.present_round.number

    @property
    def is_closed(self) -> bool:
        """Whether this round's contribution has been handed out: what comes now counts for the next one, or waits."""
        return self.context.backend.weights.round.closed

    @property
    def samples_per_second(self) -> float:
        """What the compute thread manages, forward and backward; 0 before the first microbatch."""
        seconds = self._seconds_per_sample.value
        return 1.0 / seconds if seconds else 0.0

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way that would be lost with this peer, until its acknowledgement is passed on."""
        return self.admission.num_admitted > 0 or self.answers.are_under_way

    # -- for calls ---------------------------------------------------------------------------------------------------

    def known_inputs(self, microbatch: Microbatch) -> Mapping[str, torch.Tensor] | None:
        """What a microbatch brings, if this peer has it already."""
        known = self.setting.known(microbatch)
        return None if known is None else known.order.wire_inputs

    async def begin(
        self,
        microbatch: Microbatch,
        tensors: Mapping[str, torch.Tensor],
        hints: Mapping[int, PeerId],
        subscriber: object,
        still_waiting: Callable[[], Awaitable[None]] | None = None,
    ) -> Computation:
        """The computation that answers a microbatch, new or known; `subscriber` gets the answer.

        Args:
            hints: which peers of later stages know the microbatch already.
            still_waiting: called at once and every now and then while the microbatch's round has not begun here. What
                it raises ends the wait, and nothing has been begun.

        Raises:
            StaleMicrobatch, NotReady.
        """
        await self.setting.until_due(microbatch, still_waiting)
        answer = self._answer_to(microbatch)
        if isinstance(answer, Computation):
            answer.subscribe(subscriber)
            return answer
        if answer.instead_of is not None:
            answer.instead_of.subscribe(subscriber)
            self.endings.discard(answer.instead_of)
        answers_gradient = microbatch.answers_gradient(self.number)
        computation = self._start(answer, tensors, hints, answers_gradient=answers_gradient)
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
        self.counters.add("repeated")
        self.context.events.write(Repeat(microbatch=microbatch.index, state=entry.state))
        return self.setting.repeated(microbatch, entry)

    def _start(
        self, start: Start, tensors: Mapping[str, torch.Tensor], hints: Mapping[int, PeerId], *, answers_gradient: bool
    ) -> Computation:
        if start.accumulate and self._is_changing_state:
            raise NotReady("this peer takes over another state")
        microbatch, context = start.microbatch, self.context
        accumulate = start.accumulate and self.setting.takes_gradients
        if start.earlier is not None:
            # The caller may know of a replay since; one that knows nothing is helped all the same.
            hints = microbatch.known_by({**start.earlier.result().route, **hints})
        order = Order(
            microbatch=microbatch,
            wire_inputs=tensors,
            accumulate=accumulate,
            answers_gradient=answers_gradient,
            age=context.runtime.next_age(),
            hints=hints,
            adopts=start.adopts,
            earlier=start.earlier,
        )
        computation = Computation(
            order,
            backend=context.backend,
            runtime=context.runtime,
            hop=context.hop,
            # What is not accumulated goes into no step, and waits for none.
            turn=self.setting.turn(order.age) if accumulate else contextlib.nullcontext(),
            # Not the computation itself: it would hold itself, and its tensors, until Python looks for such cycles.
            on_accumulated=lambda: self._accumulated(microbatch, accumulate=accumulate),
        )
        if accumulate:
            self.ledger.begin(microbatch.index, microbatch.round, computation)
        if start.adopts is not None:
            start.adopts.subscribe(computation)
        self.counters.add("forwards", computation.has_forward)
        return computation

    def _accumulated(self, microbatch: Microbatch, *, accumulate: bool) -> None:
        self.counters.add("backwards")
        self.admission.had_memory()
        if accumulate:
            self.ledger.accumulated(microbatch.index)

    # -- for the group's member --------------------------------------------------------------------------------------

    async def seal(self, drop: Collection[int]) -> None:
        """The round is about to end: undo what must not be in it, if the setting has it so.

        Args:
            drop: microbatches that another member counts.
        """
        leaving = self.setting.seal(drop)
        if leaving is not None:
            await self.endings.discard_all(leaving)

    def round_began(self) -> None:
        """The weights are at a new round."""
        self.setting.round_began()
        self.present_round.began()
        self.endings.changed()

    @asynccontextmanager
    async def changing_state(self) -> AsyncIterator[None]:
        """Inside the block another state is installed: before, everything unfinished is undone, and everything else
        forgotten."""
        self._is_changing_state = True
        try:
            await self.endings.discard_all(self.ledger.uncommitted())
            self.ledger.prune(self.round + 1)
            yield
        finally:
            self._is_changing_state = False

    # -- for the program ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Admit nothing any more: no retry will come, and none is waited for."""
        self.admission.close()
        self.endings.end()


def stage_of(context: StageContext) -> Stage:
    """A stage peer's parts, put together."""
    records = Records()
    present_round = PresentRound(context.backend.weights)
    setting = setting_of(context, present_round, records)
    return Stage(
        context,
        setting=setting,
        present_round=present_round,
        records=records,
        admission=Admission(context, setting, present_round, records),
        endings=Endings(context, setting, records),
        held_rounds=HeldRounds(context.backend.weights.anchor, lambda: present_round.number),
    )
