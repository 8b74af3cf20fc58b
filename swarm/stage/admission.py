"""Decides whether a stage peer takes a microbatch: it must serve, and have memory, and a slot for the caller.

A peer takes as many microbatches as keep it busy, wherever they are. On a fast network a few are enough. Over long or
slow links most microbatches are on their way somewhere, so more are needed for the same work. So one slot is added when
a caller has to be refused while the peer has next to nothing to do. While work piles up the number slowly falls again.
Meanwhile only the least number of slots is given out, so that no work waits here that another peer could do.

Each caller may take slots that no other caller wants. After a caller was refused, a slot is reserved for it, which
callers with clearly more slots cannot take, until it comes again, or some time has passed. So one caller cannot take
the others' share by many requests. A caller that has other peers to ask gets no slot while something waits here
already. In this way work finds idle peers, even among many callers that know nothing of each other. Nothing here waits:
a refused caller asks again.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from swarm.errors import Fatal, NotReady, Overloaded
from swarm.machine.clock import Clock
from swarm.machine.out_of_memory import SMALLER, what_was_asked
from swarm.machine.words import counted
from swarm.stage.context import StageContext
from swarm.stage.graphs import GraphBudget
from swarm.stage.settings.setting import Setting
from swarm.training.samples import Microbatch

logger = logging.getLogger(__name__)

LARGEST_NUM_SLOTS = 64
"""The most slots that a peer can get. Each holds received tensors and, if there is memory, a graph."""
FEW = 2
"""With this many tasks at the compute thread, including the running one, it will soon have nothing to do."""
PILE = 4
"""With this many tasks at the compute thread, work piles up."""
PATIENCE_SECONDS = 0.5
"""A slot is reserved for a refused caller for twice the seconds after which it should ask again, plus this time,
because lines and busy machines are slow."""
SHORTEST_RETRY_SECONDS = 0.02
LONGEST_RETRY_SECONDS = 1.0
CLEARLY_MORE = 2
"""A caller that holds at least this many slots more than another one holds clearly more. A difference of one is
chance."""
TRIES = 3
"""Microbatches that may fail in a row, one at a time, before the peer gives up."""
SHORTAGE_RETRY_SECONDS = 0.2
"""How long a microbatch waits before it is offered again to a peer that lacks the memory for one more."""


class SlotCount:
    """The number of slots. It grows fast and shrinks slowly, because an idle peer costs more than a short queue.

    Args:
        queue_length: gives the number of tasks at the compute thread, including the running one.
        room: gives the most microbatches that may be in flight even if the peer is idle (Setting.room); None: any
            number.
    """

    def __init__(
        self, least: int, largest: int, queue_length: Callable[[], int], room: Callable[[], int | None] = lambda: None
    ) -> None:
        self._learnt = float(least)
        self.least = least
        """The least number of slots, unless `room` allows fewer."""
        self._largest = max(least, largest)
        self._queue_length = queue_length
        self._room = room

    @property
    def size(self) -> int:
        return max(0, min(self._most(), self.least if self._piles_up() else int(self._learnt)))

    @property
    def lacks_work(self) -> bool:
        return self._queue_length() <= FEW

    @property
    def has_enough(self) -> bool:
        """Whether some task waits for the compute thread, so that an idle peer would finish new work sooner."""
        return self._queue_length() >= FEW

    def refused(self, *, idle: bool) -> None:
        """Note that a caller wanted a slot when all were taken. If the peer is `idle` all the same, add one."""
        if idle and int(self._learnt) <= self._most():
            self._learnt = min(float(self._largest), self._learnt + 1.0)

    def freed(self) -> None:
        """Note that a slot was given back. While work piles up, the number falls."""
        if self._piles_up():
            # It falls by about one in the time in which each slot is used once.
            self._learnt = max(float(self.least), self._learnt - 1.0 / self._learnt)

    def _most(self) -> int:
        room = self._room()
        return self._largest if room is None else room

    def _piles_up(self) -> bool:
        return self._queue_length() >= PILE


class Slots:
    """The slots that callers have. `count` gives the number of slots."""

    def __init__(self, count: SlotCount, clock: Clock) -> None:
        self._count = count
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._refused: dict[str, float] = {}
        """Callers that were refused, with the time until which a slot is reserved for each."""

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_free(self) -> int:
        """Slots that are free. Negative if the number of slots has fallen below the number held."""
        return self._count.size - self.num_held

    def grants(self, *, has_others: bool) -> int:
        """The number of slots that a reply grants: at most one, because all replies refer to the same free slots."""
        return 0 if has_others and self._count.has_enough else max(0, min(1, self.num_free))

    def take(self, caller: str, *, busy_seconds: float, idle: bool = False, has_others: bool = False) -> None:
        """Take a slot; `give_back` frees it.

        Args:
            busy_seconds: how long a microbatch keeps the peer busy; 0 if that is not known yet.
            idle: whether the peer has nothing to do, although other microbatches have slots.
            has_others: whether the caller knows peers that it has not asked.

        Raises:
            Overloaded: there is no slot for this caller now.
        """
        if has_others and self._count.has_enough:
            # No slot is reserved for this caller, because it asks other peers. It may ask here again when about one
            # task is done.
            raise Overloaded("work waits here already", retry_after_seconds=_retry_seconds(busy_seconds / 2))
        if self.num_free <= 0:
            self._count.refused(idle=idle)
        now = self._clock.monotonic()
        self._refused = {other: until for other, until in self._refused.items() if until > now}
        own = self._held[caller]
        num_kept = sum(own - self._held[other] >= CLEARLY_MORE for other in self._refused if other != caller)
        if self.num_free <= num_kept:
            retry_seconds = _retry_seconds(busy_seconds)
            self._refused[caller] = now + PATIENCE_SECONDS + 2 * retry_seconds
            reason = f"{counted(self.num_held, 'microbatch')} in flight"
            raise Overloaded(reason, retry_after_seconds=retry_seconds)
        self._refused.pop(caller, None)
        self._held[caller] += 1

    def take_beyond(self, caller: str) -> None:
        """Take a slot, though none may be free; `give_back` gives it back."""
        self._held[caller] += 1

    def give_back(self, caller: str) -> None:
        self._count.freed()
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]


def _retry_seconds(busy_seconds: float) -> float:
    return min(max(busy_seconds, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)


class Shortage:
    """The reduced limits of a peer whose memory ran out.

    Each failure halves the microbatches that may be in flight, and the graphs that may be kept. A peer that takes one
    microbatch at a time, and fails at several in a row, gives up. It never takes more again, because the next failure
    might be in an optimizer step, which ends the peer at once.

    Attributes:
        num_reductions: how often `most_in_flight` was reduced. If a microbatch that began before the last reduction
            fails, this says nothing about the present limit.
        fault: the reason why the peer gives up; None before that.
    """

    def __init__(self, stage: int, budget: GraphBudget) -> None:
        self.most_in_flight = math.inf
        self.num_reductions = 0
        self.fault: Fatal | None = None
        self._stage = stage
        self._budget = budget
        self._num_failures = 0

    def failed(self, error: BaseException, *, num_reductions: int, in_flight: int) -> None:
        """Note that a microbatch failed for lack of memory. `num_reductions` is that from when the microbatch was
        admitted. `in_flight` counts microbatches in flight, that one included."""
        if num_reductions < self.num_reductions or self.fault is not None:
            return
        asked = what_was_asked(error)
        if self.most_in_flight > 1:
            self.most_in_flight = max(1, min(in_flight, self.most_in_flight) // 2)
            self.num_reductions += 1
            self._budget.halve()
            logger.warning(
                "out of memory (no room for %s, %d in flight): this peer takes %s at most from now on",
                asked, in_flight, counted(int(self.most_in_flight), "microbatch"),
            )  # fmt: skip
            return
        self._num_failures += 1
        if self._num_failures >= TRIES:
            self.fault = Fatal(
                f"stage {self._stage} ran out of memory at {TRIES} microbatches in a row, one at a time (no room for "
                f"{asked}): the run needs {SMALLER} or more stages, or this peer another --device or more memory"
            )

    def succeeded(self) -> None:
        self._num_failures = 0


class Slot(NamedTuple):
    """A slot that a microbatch has taken.

    Attributes:
        queue: see Setting.queue_of.
        num_reductions: see Shortage.
        awaited: the microbatch that got it whether one was free or not; None if one had to be free.
    """

    queue: int
    caller: str
    num_reductions: int
    awaited: int | None = None


class Admission:
    def __init__(self, context: StageContext, setting: Setting) -> None:
        self._context = context
        self._setting = setting
        self._round = context.present_round
        self._count = SlotCount(
            context.limits.max_in_flight, context.limits.largest_in_flight,
            lambda: context.runtime.queue_length + setting.num_waiting, setting.room,
        )  # fmt: skip
        self._slots: dict[int, Slots] = {}
        """The taken slots, by what `Setting.queue_of` gives for the rounds of their microbatches."""
        self._awaited: set[int] = set()
        """The microbatches that got a slot whether one was free or not: one each."""
        self._shortage = Shortage(context.stage, context.backend.budget)
        self._has_given_up = asyncio.Event()
        self.is_open = False
        """Whether microbatches, and sessions, are taken at all."""

    # -- for the program ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        """Admit nothing until `open` is called, because the peer is joining or leaving. At first it is closed."""
        self.is_open = False

    @property
    def fault(self) -> Fatal | None:
        return self._shortage.fault

    async def gives_up(self) -> None:
        await self._has_given_up.wait()

    # -- for calls ---------------------------------------------------------------------------------------------------

    @property
    def num_admitted(self) -> int:
        return sum(slots.num_held for slots in self._slots.values())

    def grants(self, *, has_others: bool) -> int:
        """The slots that a reply grants for the current round; see Slots.grants."""
        slots = self._slots_of(self._setting.queue_of(self._round.number))
        return 0 if self._lacks_memory(slots) else slots.grants(has_others=has_others)

    def admit(self, microbatch: Microbatch, caller: str = "", *, has_others: bool = False) -> Slot:
        """Take a slot for a microbatch; `leave` gives it back. Refuses if the caller should rather ask another peer.

        Raises:
            MalformedMessage, Overloaded, NotReady, StaleMicrobatch.
        """
        if not self.is_open:
            raise NotReady("the peer is joining or leaving")
        if self._shortage.fault is not None:
            raise NotReady("the peer has no memory, and leaves")
        self._setting.check(microbatch)
        queue = self._setting.queue_of(microbatch.round)
        self._slots = {q: slots for q, slots in self._slots.items() if slots.num_held or q >= queue}
        slots = self._slots[queue] = self._slots_of(queue)
        is_awaited = microbatch.index not in self._awaited and self._setting.is_awaited(microbatch)
        # What waits for its turn has no graph yet.
        if self._lacks_memory(slots, self._setting.num_waiting if is_awaited else 0):
            raise Overloaded("there is no memory for more", retry_after_seconds=SHORTAGE_RETRY_SECONDS)
        if is_awaited:
            slots.take_beyond(caller)
            self._awaited.add(microbatch.index)
            return Slot(queue, caller, self._shortage.num_reductions, microbatch.index)
        if has_others and self._setting.has_its_part(slots.num_held):
            raise Overloaded("it has its part of the round", retry_after_seconds=SHORTEST_RETRY_SECONDS)
        # A microbatch of the next round waits for the end of this one, so it does not give an idle peer work now.
        idle = microbatch.round <= self._round.number and self._is_idle
        busy_seconds = (self._context.records.seconds_per_sample.value or 0.0) * microbatch.num_samples
        slots.take(caller, busy_seconds=busy_seconds, idle=idle, has_others=has_others)
        return Slot(queue, caller, self._shortage.num_reductions)

    def leave(self, slot: Slot) -> None:
        self._slots[slot.queue].give_back(slot.caller)
        if slot.awaited is not None:
            self._awaited.remove(slot.awaited)

    def ran_out_of_memory(self, error: Exception, slot: Slot) -> None:
        """Note that a microbatch with this slot failed for lack of memory. Admit fewer from now on, or give up."""
        in_flight = self._slots_of(slot.queue).num_held
        self._shortage.failed(error, num_reductions=slot.num_reductions, in_flight=in_flight)
        if self._shortage.fault is not None:
            self._has_given_up.set()

    def had_memory(self) -> None:
        self._shortage.succeeded()

    def _slots_of(self, queue: int) -> Slots:
        return self._slots.get(queue) or Slots(self._count, self._context.clock)

    def _lacks_memory(self, slots: Slots, num_waiting: int = 0) -> bool:
        """Whether as many microbatches, but for so many that wait, are under way as memory is known to allow."""
        return slots.num_held - num_waiting >= self._shortage.most_in_flight

    @property
    def _is_idle(self) -> bool:
        """Whether one more microbatch would give the peer more to do now: the microbatch need not wait, and fits in
        memory."""
        return not (
            not self._count.lacks_work
            or self._setting.num_waiting
            or self._context.records.answers.num_written
            or self._context.is_held_up
            or not self._context.backend.function.has_room()
        )
