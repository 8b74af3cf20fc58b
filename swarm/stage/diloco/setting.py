"""Microbatches with DiLoCo: each peer takes inner steps of its own, and a round has no fixed ids.

Replicas differ, so a repeat brings other activations and gets a gradient of its own. It is accumulated only if no
gradient of the microbatch was before. Acknowledged gradients are never taken out again, so their computations are not
kept. A round may close at any time, and training goes on meanwhile.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager

from swarm.stage.computation import Computation
from swarm.stage.context import StageContext
from swarm.stage.diloco.turns import Turns
from swarm.stage.diloco.weights import DilocoWeights
from swarm.stage.ledger import Entry, EntryState
from swarm.stage.present_round import PresentRound
from swarm.stage.records import Records
from swarm.stage.setting import Setting, Start
from swarm.training.round_member import RoundResult
from swarm.training.samples import Microbatch


class DilocoSetting(Setting):
    """The answers with DiLoCo: a peer takes microbatches for its next inner steps, whichever round they are of."""

    def __init__(
        self, context: StageContext, weights: DilocoWeights, present_round: PresentRound, records: Records
    ) -> None:
        rounds, self._microbatch_size = context.config.rounds, context.config.data.microbatch_size
        self._stage = context.stage
        self._weights = weights
        self._round = present_round
        self._ledger = records.ledger
        self._answers = records.answers
        self._batch_microbatches = rounds.inner_batch_samples // self._microbatch_size
        self._most_ahead = (1 + rounds.max_staleness) * self._batch_microbatches
        """The most microbatches that have begun their forward and whose gradients no step has used yet."""
        self._turns = Turns(self._most_ahead, self._num_unstepped, context.clock)

    def _num_unstepped(self) -> int:
        return self._weights.buckets.num_samples_ahead // self._microbatch_size

    # -- which microbatches are admitted -----------------------------------------------------------------------------

    def check(self, microbatch: Microbatch) -> None:
        pass  # Microbatches of any round are welcome.

    def queue_of(self, round_number: int) -> int:
        return 0

    def room(self) -> int | None:
        """How many microbatches may be in flight: those of the next steps, and one inner batch to follow.

        More would only wait here, while another peer might have nothing to do.
        """
        # A microbatch whose answer is being written still has its slot, and must not be counted twice.
        waiting = max(0, self._num_unstepped() - self._answers.num_written)
        return self._most_ahead + self._batch_microbatches - waiting

    def has_its_part(self, num_in_flight: int) -> bool:
        # A DiLoCo round has no fixed number of microbatches, so no peer has a part of it.
        return False

    # -- when microbatches are computed ------------------------------------------------------------------------------

    async def until_due(self, microbatch: Microbatch, still_waiting: Callable[[], Awaitable[None]] | None) -> None:
        pass  # There is no wait: it is computed with the newest weights.

    def turn(self, age: int) -> AbstractAsyncContextManager[None]:
        return self._turns.turn(age)

    @property
    def num_waiting(self) -> int:
        return self._turns.num_waiting

    def look(self) -> None:
        self._turns.look()

    # -- what a call gets --------------------------------------------------------------------------------------------

    def known(self, microbatch: Microbatch) -> Computation | None:
        return None  # A call that asks again may bring other activations.

    def counts(self, microbatch: Microbatch) -> bool:
        return microbatch.counts_at(self._stage)

    @property
    def takes_gradients(self) -> bool:
        return True

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

    def committed(self) -> frozenset[int]:
        return frozenset()  # No peer asks for these ids, and a round may have any number of them.

    def seal(self, drop: Collection[int]) -> list[Entry[Computation]] | None:
        return None

    def round_began(self) -> None:
        # A microbatch may be repeated across a round's end; one round of memory covers that.
        self._ledger.prune(self._round.number - 1)

    def squared_norm(self, result: RoundResult) -> float:
        """The squared norm of this stage's average alone."""
        return result.squared_norm
