"""Microbatches with DiLoCo: each peer takes inner steps of its own, and a round has no fixed ids.

Replicas differ, so a repeat brings other activations and gets a gradient of its own. It is accumulated only if no
gradient of the microbatch was before. Acknowledged gradients are never taken out again, so their computations are not
kept. A round may close at any time, and training goes on meanwhile.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from swarm.machine.clock import Clock
from swarm.routing.throughput import MovingAverage
from swarm.stage.computation import Computation
from swarm.stage.context import StageContext
from swarm.stage.ledger import Entry, EntryState
from swarm.stage.settings.diloco_weights import DilocoWeights
from swarm.stage.settings.setting import Setting, Start
from swarm.training.round_member import RoundResult
from swarm.training.samples import Microbatch

LATE = 3.0
"""A turn that has taken this many times the usual seconds is late. Its microbatch may be waiting for a dead peer, for
example."""
SHORTEST_LATE_SECONDS = 1.0
"""No turn is late before this time."""
FIRST_LATE_SECONDS = 60.0
"""A turn is late after this time while no turn has ended yet, so that the usual time is unknown. It is less than
`HopLimits.stall_seconds`, after which callers take this peer for stalled."""
LOOK_SECONDS = 0.25
"""How often a waiting microbatch checks whether another one's turn has become late."""


class Turns:
    """Limits how far forwards run ahead of the inner steps that will use their gradients. Older ones come first.

    A run learns less from a gradient that is computed with older weights than those to which it is applied
    (docs/performance.md#learning). So a peer computes only as many microbatches with the same weights as its next inner
    batches need, however many it has admitted. The others begin as soon as a step is taken.

    Args:
        most: the most microbatches that have begun their forward and whose gradients no step has used. Late ones are
            not counted, because they would hold up all others. Their gradients go into later steps.
        num_unstepped: gives the number of accumulated gradients that no step has used. It is less than `most` whenever
            no step can be taken before more gradients come.
    """

    def __init__(self, most: int, num_unstepped: Callable[[], int], clock: Clock) -> None:
        self._most = most
        self._num_unstepped = num_unstepped
        self._clock = clock
        self._began_at: dict[int, float] = {}
        """When each turn began."""
        self._usual_seconds = MovingAverage(0.1)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(not turn.done() for _, _, turn in self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, age: int) -> AsyncIterator[None]:
        """Wait for a turn and have it, until the gradient is accumulated or will never be. A smaller age is older.

        Cancellation gives the turn, or the place in the queue, to the next one.
        """
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (age, number, turn))
        try:
            self.look()
            while not turn.done():
                await asyncio.wait([turn], timeout=LOOK_SECONDS)
                self.look()
            yield
            self._usual_seconds.observe(self._clock.monotonic() - self._began_at[number])
        finally:
            turn.cancel()
            self._began_at.pop(number, None)
            self.look()

    def look(self) -> None:
        """Give as many turns as there is room for. To be called after every step, and when gradients were taken out."""
        while self._waiting and self._num_running() + self._num_unstepped() < self._most:
            _, number, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._began_at[number] = self._clock.monotonic()
                turn.set_result(None)

    def _num_running(self) -> int:
        usual = self._usual_seconds.value
        late_seconds = FIRST_LATE_SECONDS if usual is None else max(SHORTEST_LATE_SECONDS, LATE * usual)
        late_since = self._clock.monotonic() - late_seconds
        return sum(began_at > late_since for began_at in self._began_at.values())


class DilocoSetting(Setting):
    def __init__(self, context: StageContext, weights: DilocoWeights) -> None:
        rounds, self._microbatch_size = context.config.rounds, context.config.data.microbatch_size
        self._stage = context.stage
        self._weights = weights
        self._round = context.present_round
        self._ledger = context.records.ledger
        self._answers = context.records.answers
        self._batch_microbatches = rounds.inner_batch_samples // self._microbatch_size
        self._most_ahead = (1 + rounds.max_staleness) * self._batch_microbatches
        """The most microbatches that have begun their forward and whose gradients no step has used yet."""
        self._turns = Turns(self._most_ahead, self._num_unstepped, context.clock)

    def _num_unstepped(self) -> int:
        return self._weights.buckets.num_samples_ahead // self._microbatch_size

    # -- which microbatches are admitted -----------------------------------------------------------------------------

    def check(self, microbatch: Microbatch) -> None:
        pass  # Microbatches of any round are welcome.

    def room(self) -> int | None:
        """How many microbatches may be in flight: those of the next steps, and one inner batch to follow.

        More would only wait here, while another peer might have nothing to do.
        """
        # A microbatch whose answer is being written still has its slot, and must not be counted twice.
        waiting = max(0, self._num_unstepped() - self._answers.num_written)
        return self._most_ahead + self._batch_microbatches - waiting

    def is_awaited(self, microbatch: Microbatch) -> bool:
        # Its gradient is in a batch of which no step is taken before it is acknowledged. A stage before this one keeps
        # it there while it offers the microbatch again, and the others may have no turn before that step.
        entry = self._ledger.find(microbatch.index)
        return entry is not None and entry.state is EntryState.TENTATIVE

    # -- when microbatches are computed ------------------------------------------------------------------------------

    def require_of_its_round(self, microbatch: Microbatch) -> None:
        pass  # It is computed with the newest weights.

    def turn(self, age: int) -> AbstractAsyncContextManager[None]:
        return self._turns.turn(age)

    @property
    def num_waiting(self) -> int:
        return self._turns.num_waiting

    def look(self) -> None:
        self._turns.look()

    # -- what a call gets --------------------------------------------------------------------------------------------

    def counts(self, microbatch: Microbatch) -> bool:
        return microbatch.counts_at(self._stage)

    def repeated(self, microbatch: Microbatch, entry: Entry[Computation]) -> Computation | Start:
        """Start a computation of a new gradient. It is accumulated only if the former one was not. One acknowledgement
        settles both."""
        known = entry.computation
        if entry.state is EntryState.COMMITTED or known is None:
            return Start(microbatch=microbatch, accumulate=False)
        if entry.state is EntryState.TENTATIVE:
            return Start(microbatch=microbatch, accumulate=False, adopts=known)
        return Start(microbatch=microbatch, accumulate=True, instead_of=known)

    # -- how microbatches end ----------------------------------------------------------------------------------------

    def acknowledged(self, microbatch: Microbatch) -> None:
        self._ledger.commit(microbatch.index, self._round.number, keep_computation=False)

    def may_be_joined(self, computation: Computation) -> bool:
        # A retry replaces a computation that is still running, and can only adopt one that is done.
        return computation.done

    # -- rounds ------------------------------------------------------------------------------------------------------

    def round_began(self) -> None:
        # A microbatch may be repeated across a round's end; one round of memory covers that.
        self._ledger.prune(self._round.number - 1)

    def squared_norm(self, result: RoundResult) -> float:
        return result.squared_norm
