"""Decides whether a stage peer takes a microbatch: it must serve, and have memory, and a slot for the caller.

stage/slots decides how many slots there are and which caller gets one, and the setting which rounds are taken. Nothing
here waits: a caller that was refused asks again.
"""

import asyncio
import logging
import math
from typing import NamedTuple

from swarm.errors import Fatal, NotReady, Overloaded
from swarm.machine.out_of_memory import SMALLER, what_was_asked
from swarm.machine.words import counted
from swarm.stage.context import StageContext
from swarm.stage.graphs import GraphBudget
from swarm.stage.settings.setting import Setting
from swarm.stage.slots import SHORTEST_RETRY_SECONDS, SlotCount, Slots
from swarm.training.samples import Microbatch

logger = logging.getLogger(__name__)

TRIES = 3
"""Microbatches that may fail in a row, one at a time, before the peer gives up."""
SHORTAGE_RETRY_SECONDS = 0.2
"""How long a microbatch waits before it is offered again to a peer that lacks the memory for one more."""


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
        """Note that a microbatch failed for lack of memory.

        Args:
            num_reductions: the number of reductions when the microbatch was admitted.
            in_flight: microbatches in flight, that one included.
        """
        if num_reductions < self.num_reductions or self.fault is not None:
            return
        asked = what_was_asked(error)
        if self.most_in_flight > 1:
            self.most_in_flight = max(1, min(in_flight, self.most_in_flight) // 2)
            self.num_reductions += 1
            self._budget.halve()
            most = counted(int(self.most_in_flight), "microbatch")
            logger.warning(
                "out of memory (no room for %s, %d in flight): this peer takes %s at most from now on",
                asked,
                in_flight,
                most,
            )
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
            context.limits.max_in_flight,
            context.limits.largest_in_flight,
            lambda: context.runtime.queue_length + setting.num_waiting,
            setting.room,
        )
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
        """The reason why this peer cannot go on, once it has given up; None before that."""
        return self._shortage.fault

    async def gives_up(self) -> None:
        """Return once this peer cannot go on, because it lacks memory."""
        await self._has_given_up.wait()

    # -- for calls ---------------------------------------------------------------------------------------------------

    @property
    def num_admitted(self) -> int:
        """Microbatches admitted and not finished."""
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
