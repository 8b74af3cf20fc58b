"""A stage peer's mind: which microbatches it takes, which it knows, what becomes of each.

Between the servicer, which speaks gRPC, and the compute thread. Keeps the promise that a microbatch never
counts twice: every accumulation goes through the ledger here. Runs on the event loop; never computes.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swarm.config import RunConfig
from swarm.errors import Fatal, NotReady, Overloaded, StaleMicrobatch
from swarm.events.kinds import Ack, Events, NoEvents, Repeat
from swarm.hop.hop import Hop
from swarm.machine.clock import Clock
from swarm.routing.throughput import MovingAverage
from swarm.stage.backend import StageBackend
from swarm.stage.computation import Computation
from swarm.stage.diloco.turns import Turns
from swarm.stage.ledger import Entry, EntryState, Ledger
from swarm.stage.runtime import Runtime
from swarm.stage.shortage import Shortage
from swarm.stage.slots import SlotCount, Slots
from swarm.training.microbatch import Microbatch
from swarm.types import PeerId

REPLAY_GAP_SECONDS = 1.0
"""After which a replay that counts at a peer is offered to it again: it may have been told to give it up meanwhile."""
SHORTAGE_RETRY_SECONDS = 0.2
"""After which a microbatch is offered again to a peer that has no memory for more than it has."""
_LOOK_SECONDS = 0.25
"""Between two looks at whether this peer, which a microbatch of the next round waits at, has fallen behind."""
_ACKNOWLEDGED = object()
"""Subscriber of a computation that nobody will ask for again."""


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """How much a stage peer takes on, and how long it waits for others."""

    max_in_flight: int
    """Microbatches admitted at once; more if that many do not keep the peer busy, up to `largest_in_flight`."""
    largest_in_flight: int = 0
    """No more than `max_in_flight` if that is larger."""
    orphan_seconds: float = 2.5
    """How long, at least, an answer whose call died waits for a retry before it is rolled back. Inner steps, and
    so the round, wait for it; a retry that comes later is merely computed again."""
    round_wait_seconds: float = 30.0
    """How long a microbatch of the next round waits for this peer to commit the current one."""


@dataclass
class Counters:
    """What happened since the peer started."""

    forwards: int = 0
    backwards: int = 0
    rerouted_backwards: int = 0
    committed: int = 0
    rolled_back: int = 0
    repeated: int = 0
    busy_replies: int = 0


class Slot(NamedTuple):
    """A place that a microbatch has taken.

    Attributes:
        num_reductions: see Shortage.
    """

    place: int
    caller: str
    num_reductions: int


class Stage:
    """Admits microbatches, answers repeats, commits and rolls back."""

    def __init__(
        self, *, config: RunConfig, backend: StageBackend, runtime: Runtime, hop: Hop | None, clock: Clock,
        tasks: asyncio.TaskGroup, limits: StageLimits, on_change: Callable[[], None] = lambda: None,
        is_behind: Callable[[], bool] = lambda: False, events: Events | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            is_behind: whether this peer's group is at a later round, whose state is still to be had.
        """
        self.config = config
        self.backend = backend
        self.runtime = runtime
        self.ledger: Ledger[Computation] = Ledger()
        self.counters = Counters()
        self.serving = False
        """Whether microbatches are admitted: not while joining or leaving."""
        self.is_changing_state = False
        """Whether another state is about to be installed: nothing is accumulated in the one that goes."""
        self.on_change = on_change
        """Called when what counts towards the round has changed."""
        self._is_behind = is_behind
        self._events = events or NoEvents()
        self._hop = hop
        self._clock = clock
        self._tasks = tasks
        self._limits = limits
        self._ages = itertools.count()
        self.num_settling = 0
        """Consequences of acknowledgements that are still under way."""
        self.num_answering = 0
        """Answers that are being written: the line takes no more."""
        self.num_unacknowledged = 0
        """Calls that have their answer, and whose acknowledgement is waited for."""
        self._turns = Turns(None if config.rounds.synchronous else self._most_ahead, self._num_unstepped, clock)
        self._slot_count = SlotCount(
            limits.max_in_flight, limits.largest_in_flight, lambda: runtime.queue_length + self._turns.num_waiting,
            (lambda: None) if config.rounds.synchronous else self._room,
        )  # fmt: skip
        self._slots: dict[int, Slots] = {}
        """By round: what waits for the next one takes no place from what this one, or the last one, still lacks."""
        self._shortage = Shortage(backend.stage, backend.budget)
        self._has_given_up = asyncio.Event()
        self._new_round = asyncio.Event()
        self._seconds_per_sample = MovingAverage(0.1)
        self._undoing: set[asyncio.Task[None]] = set()
        self._has_ended = False
        self._waiting: set[asyncio.Task[None]] = set()
        """For retries, one task for each answer that may get one."""

    @property
    def number(self) -> int:
        """Which stage this is."""
        return self.backend.stage

    @property
    def round(self) -> int:
        """The round that is being worked on."""
        return self.backend.weights.round.number

    @property
    def samples_per_second(self) -> float:
        """What the compute thread manages, forward and backward; 0 before the first microbatch."""
        return 1.0 / self._seconds_per_sample.value if self._seconds_per_sample.value else 0.0

    @property
    def num_admitted(self) -> int:
        """Microbatches admitted and not finished."""
        return sum(slots.num_held for slots in self._slots.values())

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way that would be lost with this peer, until its acknowledgement is passed on."""
        return self.num_admitted > 0 or self.num_unacknowledged > 0 or self.num_settling > 0

    def grants(self, *, has_others: bool) -> int:
        """What a reply grants for the current round; see Slots."""
        slots = self._slots_of(self._place(self.round))
        return 0 if self._lacks_memory(slots) else slots.grants(has_others=has_others)

    def _lacks_memory(self, slots: Slots) -> bool:
        """Whether memory ran out with no more microbatches than there are now."""
        return slots.num_held >= self._shortage.most_in_flight

    @property
    def _is_idle(self) -> bool:
        """Whether more microbatches would have the peer do more: they would wait for nothing here, and fit."""
        return not (
            not self._slot_count.lacks_work
            or self._turns.num_waiting
            or self.num_answering
            or (self._hop is not None and self._hop.is_held_up)
            or not self.backend.budget.has_room()
        )

    def _place(self, round_number: int) -> int:
        # All that is further ahead shares one place: their number must not grow with what callers name.
        return min(round_number, self.round + 1) if self.config.rounds.synchronous else 0

    # -- admission -------------------------------------------------------------------------------------------------

    def admit(self, microbatch: Microbatch, caller: str = "", *, has_others: bool = False) -> Slot:
        """Take a slot for a caller's microbatch, unless it had better ask another peer; give it back with `leave`.

        In the synchronous setting one of the last round is taken as well, with the weights of that round: a stage that
        lost all its peers and came back from a checkpoint has that round to do again. Here it counts no more.

        Raises:
            Overloaded, NotReady, StaleMicrobatch.
        """
        if not self.serving:
            raise NotReady("the peer is joining or leaving")
        if self._shortage.fault is not None:
            raise NotReady("the peer has no memory, and leaves")
        if self.config.rounds.synchronous:
            self._check_round(microbatch)
            self._check_replay(microbatch)
        place = self._place(microbatch.round)
        self._slots = {p: slots for p, slots in self._slots.items() if slots.num_held or p >= place}
        slots = self._slots[place] = self._slots_of(place)
        if self._lacks_memory(slots):
            raise Overloaded("there is no memory for more", retry_after_seconds=SHORTAGE_RETRY_SECONDS)
        # One of the next round waits for the end of this one, however little there is to do.
        idle = microbatch.round <= self.round and self._is_idle
        slots.take(caller, busy_seconds=self._busy_seconds(), idle=idle, has_others=has_others)
        return Slot(place, caller, self._shortage.num_reductions)

    def _slots_of(self, place: int) -> Slots:
        return self._slots.get(place) or Slots(self._slot_count, self._clock)

    def known_inputs(self, microbatch: Microbatch) -> Mapping[str, torch.Tensor] | None:
        """What a microbatch brings, if this peer has it already."""
        known = self._known(microbatch)
        return None if known is None else known.wire_inputs

    def _known(self, microbatch: Microbatch) -> Computation | None:
        """Synchronous: the computation of a microbatch that this peer accumulates; another one has the same numbers."""
        entry = self.ledger.find(microbatch.index) if self.config.rounds.synchronous else None
        known = None if entry is None else entry.computation
        return None if known is None or known.failed else known

    def _busy_seconds(self) -> float:
        """What a microbatch takes of the compute thread's time, as far as is known."""
        return (self._seconds_per_sample.value or 0.0) * self.config.data.microbatch_size

    def leave(self, slot: Slot) -> None:
        """Give a slot back."""
        self._slots[slot.place].give_back(slot.caller)

    def ran_out_of_memory(self, error: Exception, slot: Slot) -> None:
        """A microbatch that has this slot failed for want of memory: less is taken, or the peer gives up."""
        in_flight = self._slots_of(slot.place).num_held
        self._shortage.failed(error, num_reductions=slot.num_reductions, in_flight=in_flight)
        if self._shortage.fault is not None:
            self._has_given_up.set()

    @property
    def fault(self) -> Fatal | None:
        """Why this peer cannot go on, once it has given up."""
        return self._shortage.fault

    async def gives_up(self) -> None:
        """Return once this peer cannot go on, for want of memory."""
        await self._has_given_up.wait()

    @property
    def _batch_microbatches(self) -> int:
        """DiLoCo: microbatches of an inner batch."""
        return self.config.rounds.inner_batch_samples // self.config.data.microbatch_size

    @property
    def _most_ahead(self) -> int:
        """DiLoCo: microbatches with which the weights may be computed that the next steps start from."""
        return (1 + self.config.rounds.max_staleness) * self._batch_microbatches

    def _num_unstepped(self) -> int:
        return self.backend.weights.buckets.num_samples_ahead // self.config.data.microbatch_size

    def _room(self) -> int:
        """DiLoCo: microbatches that may be in flight: those with which the next steps are taken, and a batch to follow.

        More would wait here, while another peer might have nothing to do.
        """
        # While an answer is written, its microbatch has its slot as well.
        waiting = max(0, self._num_unstepped() - self.num_answering)
        return self._most_ahead + self._batch_microbatches - waiting

    def _check_round(self, microbatch: Microbatch) -> None:
        if microbatch.round < self.round - 1:
            raise StaleMicrobatch(f"microbatch {microbatch.index}: round {microbatch.round} has committed")
        if microbatch.round < self.round:
            if self.backend.weights.anchor(microbatch.round) is None:
                raise NotReady(f"this peer was not there in round {microbatch.round}")
            return
        # Later stages take whatever stage 0 admitted, and wait for their own commit if they must; for a download, which
        # takes longer, they have it wait elsewhere.
        if microbatch.round > self.round and self._is_behind():
            raise Overloaded(f"this peer is at round {self.round} and catches up", retry_after_seconds=0.25)
        if self.number == 0 and microbatch.round > self.round:
            raise Overloaded(f"round {self.round} has not committed yet", retry_after_seconds=0.05)
        # What another stage lacks has to come through here, though this one has all: that stage cannot commit without.
        counts_here = microbatch.counts_at(self.number)
        if self.number == 0 and counts_here and self.backend.weights.round.closed:
            raise Overloaded(f"round {self.round} is being averaged", retry_after_seconds=0.05)

    def _check_replay(self, microbatch: Microbatch) -> None:
        """Refuse what counts here already: its stage's leader does not hear of this peer, and wants it from another."""
        entry = self.ledger.find(microbatch.index) if microbatch.accumulate_only_at == self.number else None
        if entry is not None and entry.state is EntryState.COMMITTED:
            raise Overloaded("it counts here: another peer has to replay it", retry_after_seconds=REPLAY_GAP_SECONDS)

    def next_age(self) -> int:
        """Of new work at the compute thread: it comes after what was there before, of the same kind."""
        return next(self._ages)

    async def reach_round(self, number: int, seconds: float) -> None:
        """Wait until this peer is at a round, or a later one. Raises TimeoutError after so many seconds."""
        async with asyncio.timeout(seconds):
            while self.round < number:
                self._new_round.clear()
                await self._new_round.wait()

    async def _wait_for_round(self, number: int, still_waiting: Callable[[], Awaitable[None]] | None) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + self._limits.round_wait_seconds
        while self.round < number:
            if self._is_behind() or now() >= deadline:
                raise NotReady(f"this peer is at round {self.round}, and will be for a while")
            if still_waiting is not None:
                await still_waiting()
            with contextlib.suppress(TimeoutError):
                await self.reach_round(number, min(_LOOK_SECONDS, deadline - now()))

    # -- computing ---------------------------------------------------------------------------------------------------

    async def begin(
        self, microbatch: Microbatch, tensors: Mapping[str, torch.Tensor], hints: Mapping[int, PeerId],
        subscriber: object, still_waiting: Callable[[], Awaitable[None]] | None = None,
    ) -> Computation:  # fmt: skip
        """The computation that answers a microbatch, new or known; `subscriber` gets the answer.

        Where replicas are equal (synchronous) a known microbatch is joined, unless it was a replay, which other stages
        have not accumulated. Where they differ, the new activations get a gradient of their own, which is accumulated
        only if none has been yet.

        Args:
            still_waiting: called at once and every now and then while the microbatch's round has not begun here. What
                it raises ends the wait, and nothing has been begun.

        Raises:
            StaleMicrobatch, NotReady.
        """
        if self.config.rounds.synchronous:
            await self._wait_for_round(microbatch.round, still_waiting)
        answers_gradient = microbatch.answers_gradient(self.number)
        start = functools.partial(
            self._start, tensors=tensors, hints=hints, subscriber=subscriber, answers_gradient=answers_gradient
        )
        is_past = self.config.rounds.synchronous and microbatch.round < self.round
        contributes = microbatch.counts_at(self.number) and not is_past
        if not contributes:
            known = self._known(microbatch)
            return start(microbatch, accumulate=False, earlier=known if known is not None and known.done else None)
        entry = self.ledger.find(microbatch.index)
        if entry is None:
            return start(microbatch, accumulate=True)
        self.counters.repeated += 1
        self._events.write(Repeat(microbatch=microbatch.index, state=entry.state))
        known = entry.computation
        if entry.state is EntryState.COMMITTED or known is None:
            if not self.config.rounds.synchronous:
                return start(microbatch, accumulate=False)
            return start(self._already_counted(microbatch), accumulate=False, earlier=known)
        if entry.state is EntryState.TENTATIVE and not self.config.rounds.synchronous:
            return start(microbatch, accumulate=False, adopts=known)
        known.subscribe(subscriber)
        is_enough = known.microbatch.accumulate_only_at in (None, microbatch.accumulate_only_at)
        if self.config.rounds.synchronous and is_enough and not known.failed:
            return known
        self._discard(known)
        return start(microbatch, accumulate=True)

    def _already_counted(self, microbatch: Microbatch) -> Microbatch:
        """What of a microbatch is still to be done, though it counts here.

        Later stages were told that it counts, and whatever they have lost they have replayed: elsewhere, it would only
        have to be taken out again. Stage 0 lacks its gradient for nobody.
        """
        if self.number == 0 and microbatch.accumulate_only_at is None:
            raise StaleMicrobatch(f"microbatch {microbatch.index} counts already")
        return dataclasses.replace(microbatch, accumulate_only_at=self.number)

    def _start(
        self, microbatch: Microbatch, *, tensors: Mapping[str, torch.Tensor], hints: Mapping[int, PeerId],
        subscriber: object, answers_gradient: bool, accumulate: bool, adopts: Computation | None = None,
        earlier: Computation | None = None,
    ) -> Computation:  # fmt: skip
        if accumulate and self.is_changing_state:
            raise NotReady("this peer takes over another state")
        # A stage closes when its members have the whole round. If one of them has died since, what it contributed may
        # still be committed; what then lacks all the same is replayed. And another stage that did lose something must
        # not wait for this one to open again: this one may be waiting for that.
        accumulate = accumulate and not (self.config.rounds.synchronous and self.backend.weights.round.closed)
        if earlier is not None:
            # Who asks may know of a replay since; who asks knowing nothing is helped all the same.
            hints = microbatch.known_by({**earlier.result().route, **hints})
        computation = Computation(
            microbatch=microbatch, wire_inputs=tensors, accumulate=accumulate, answers_gradient=answers_gradient,
            age=self.next_age(), hints=hints, backend=self.backend, runtime=self.runtime, hop=self._hop,
            turns=self._turns, adopts=adopts, earlier=earlier,
            # Not the computation itself: it would hold itself, and its tensors, until Python looks for such cycles.
            on_accumulated=lambda: self._accumulated(microbatch, accumulate=accumulate),
        )  # fmt: skip
        if accumulate:
            self.ledger.begin(microbatch.index, microbatch.round, computation)
        if adopts is not None:
            adopts.subscribe(computation)
        computation.subscribe(subscriber)
        self.counters.forwards += computation.has_forward
        computation.start(self._tasks)
        return computation

    def _accumulated(self, microbatch: Microbatch, *, accumulate: bool) -> None:
        self.counters.backwards += 1
        self._shortage.succeeded()
        if accumulate:
            self.ledger.accumulated(microbatch.index)

    # -- the end of a computation --------------------------------------------------------------------------------------

    def acknowledge(self, computation: Computation) -> None:
        """The answer was acknowledged: the microbatch counts here from now on, and downstream will be told."""
        computation.subscribe(_ACKNOWLEDGED)
        holder = computation.adopts or computation
        holder.subscribe(_ACKNOWLEDGED)
        entry = self.ledger.find(computation.microbatch.index)
        # It may have been taken out of the round meanwhile, as a double of another member's.
        if entry is not None and entry.computation is holder and entry.state is EntryState.TENTATIVE:
            synchronous = self.config.rounds.synchronous
            counts_for = computation.microbatch.round if synchronous else self.round
            self.ledger.commit(computation.microbatch.index, counts_for, keep_computation=synchronous)
            self.counters.committed += 1
            self._events.write(Ack(microbatch=computation.microbatch.index))
            if not computation.microbatch.is_replay:  # It takes less.
                self._seconds_per_sample.observe(computation.result().busy_seconds / computation.microbatch.num_samples)
            self._pass_on(self._settle(holder))
        if computation.adopts is not None:
            computation.adopts.close_downstream()
        self._pass_on(computation.acknowledge_downstream())

    async def _settle(self, computation: Computation) -> None:
        await computation.settle(keep_answer=self.config.rounds.synchronous)
        self.changed()

    def changed(self) -> None:
        """Gradients were acknowledged, stepped with or taken out: what waits for that goes on."""
        self._turns.look()
        self.on_change()

    def _pass_on(self, consequence: Coroutine[None, None, None]) -> None:
        """Let what follows from an acknowledgement happen by itself: its sender need not wait for that."""
        self.num_settling += 1
        self._tasks.create_task(consequence).add_done_callback(self._passed_on)

    def _passed_on(self, _: asyncio.Task[None]) -> None:
        self.num_settling -= 1

    def abandon(self, computation: Computation, subscriber: object) -> None:
        """The call that waited for the answer is gone: keep it a while for a retry, if one can use it; then undo it."""
        if computation.subscriber is not subscriber:
            return
        self._tasks.create_task(self._expire(computation, computation.orphan()))

    def end(self) -> None:
        """Nothing is admitted any more: no retry will come, and none is waited for."""
        self.serving, self._has_ended = False, True
        for waiting in self._waiting:
            waiting.cancel()

    async def _expire(self, computation: Computation, orphan: object) -> None:
        # A trainer retries elsewhere; and with DiLoCo a retry brings other activations: it has no use for what is under
        # way here, only for what behind this peer is done.
        may_be_joined = self.config.rounds.synchronous and self.number > 0
        if not self._has_ended and not computation.failed and (computation.done or may_be_joined):
            # Whoever takes the dead neighbour's place has its own computation to do before it asks.
            own_seconds = (self._seconds_per_sample.value or 0.0) * computation.microbatch.num_samples
            seconds = max(self._limits.orphan_seconds, 3 * own_seconds)
            waiting = self._tasks.create_task(self._clock.sleep(seconds))
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
            await asyncio.wait([waiting])
        if computation.subscriber is orphan:
            self._discard(computation)
            if computation.adopts is not None and computation.adopts.subscriber is computation:
                self._discard(computation.adopts)

    def _discard(self, *computations: Computation) -> None:
        """Begin to undo computations that will not be acknowledged.

        They are forgotten at once: a retry that comes meanwhile starts afresh, rather than adopt what is going away.
        """
        for computation in computations:
            entry = self.ledger.find(computation.microbatch.index)
            if entry is not None and entry.computation is computation:
                self.counters.rolled_back += entry.state is not EntryState.RUNNING
                self.ledger.forget(computation.microbatch.index)
            computation.stop()
        undoing = self._tasks.create_task(self._undo(computations))
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def _undo(self, computations: Sequence[Computation]) -> None:
        for computation in computations:
            await computation.stopped()

        def undo() -> None:
            given_up = [computation.give_up() for computation in computations]
            self.backend.roll_back([accumulated for accumulated in given_up if accumulated is not None])

        # After whatever the compute thread is still doing for them: there is only one thread.
        await self.runtime.control(undo)
        # The computations' own tasks, which are cancelled, did not hear of a step that failed.
        self.backend.weights.require_sound()
        self.changed()

    # -- rounds --------------------------------------------------------------------------------------------------------

    async def discard_uncommitted(self, round_number: int, drop: frozenset[int]) -> None:
        """Before a synchronous round closes: undo what was never acknowledged, and what another member counts."""
        doubles = [entry for entry in map(self.ledger.find, drop) if entry is not None]
        await self._discard_all([*self.ledger.uncommitted(round_number), *doubles])

    async def forget_all(self) -> None:
        """Before another state is installed: undo everything unfinished, forget everything else."""
        await self._discard_all(self.ledger.uncommitted())
        self.ledger.prune(self.round + 1)

    async def _discard_all(self, entries: Iterable[Entry[Computation]]) -> None:
        computations = [entry.computation for entry in entries if entry.computation is not None]
        if computations:
            self._discard(*computations)
        if self._undoing:
            # What was being undone already as well: the ledger knows it no more, and it is still in the sum.
            await asyncio.wait(set(self._undoing))

    def round_began(self) -> None:
        """The weights are at a new round."""
        # With DiLoCo a microbatch may be repeated across a round's end; one round of memory covers that.
        self.ledger.prune(self.round if self.config.rounds.synchronous else self.round - 1)
        self._new_round.set()
        self.changed()
