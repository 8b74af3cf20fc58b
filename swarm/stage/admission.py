"""Decides whether a stage peer takes a microbatch: it must serve, and have memory, and a slot for the caller.

Used by stage/servicer. stage/slots decides how many slots there are and which caller gets one, stage/shortage what the
peer does when its memory runs out, and the setting which rounds are taken. Nothing here waits: a caller that was
refused asks again.
"""

import asyncio
from typing import NamedTuple

from swarm.errors import Fatal, NotReady, Overloaded
from swarm.stage.context import StageContext
from swarm.stage.present_round import PresentRound
from swarm.stage.records import Records
from swarm.stage.setting import Setting
from swarm.stage.shortage import Shortage
from swarm.stage.slots import SHORTEST_RETRY_SECONDS, SlotCount, Slots
from swarm.training.samples import Microbatch

SHORTAGE_RETRY_SECONDS = 0.2
"""How long a microbatch waits before it is offered again to a peer that lacks the memory for one more."""


class Slot(NamedTuple):
    """A slot that a microbatch has taken.

    Attributes:
        queue: see Setting.queue_of.
        num_reductions: see Shortage.
    """

    queue: int
    caller: str
    num_reductions: int


class Admission:
    """One peer's decisions about microbatches that are offered to it."""

    def __init__(self, context: StageContext, setting: Setting, present_round: PresentRound, records: Records) -> None:
        self._context = context
        self._setting = setting
        self._round = present_round
        self._records = records
        self._count = SlotCount(
            context.limits.max_in_flight,
            context.limits.largest_in_flight,
            lambda: context.runtime.queue_length + setting.num_waiting,
            setting.room,
        )
        self._slots: dict[int, Slots] = {}
        """The taken slots, by what `Setting.queue_of` gives for the rounds of their microbatches."""
        self._shortage = Shortage(context.stage, context.backend.budget)
        self._has_given_up = asyncio.Event()
        self.is_open = False
        """Whether microbatches, and sessions, are taken at all."""

    # -- for the program ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Admit microbatches from now on."""
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
        if self._lacks_memory(slots):
            raise Overloaded("there is no memory for more", retry_after_seconds=SHORTAGE_RETRY_SECONDS)
        if has_others and self._setting.has_its_part(slots.num_held):
            raise Overloaded("it has its part of the round", retry_after_seconds=SHORTEST_RETRY_SECONDS)
        # A microbatch of the next round waits for the end of this one, so it does not give an idle peer work now.
        idle = microbatch.round <= self._round.number and self._is_idle
        busy_seconds = (self._records.seconds_per_sample.value or 0.0) * microbatch.num_samples
        slots.take(caller, busy_seconds=busy_seconds, idle=idle, has_others=has_others)
        return Slot(queue, caller, self._shortage.num_reductions)

    def leave(self, slot: Slot) -> None:
        """Give a slot back."""
        self._slots[slot.queue].give_back(slot.caller)

    def ran_out_of_memory(self, error: Exception, slot: Slot) -> None:
        """Note that a microbatch with this slot failed for lack of memory. Admit fewer from now on, or give up."""
        in_flight = self._slots_of(slot.queue).num_held
        self._shortage.failed(error, num_reductions=slot.num_reductions, in_flight=in_flight)
        if self._shortage.fault is not None:
            self._has_given_up.set()

    def had_memory(self) -> None:
        """Note that a microbatch was computed without running out of memory."""
        self._shortage.succeeded()

    def _slots_of(self, queue: int) -> Slots:
        return self._slots.get(queue) or Slots(self._count, self._context.clock)

    def _lacks_memory(self, slots: Slots) -> bool:
        """Whether as many microbatches are under way as memory is known to allow."""
        return slots.num_held >= self._shortage.most_in_flight

    @property
    def _is_idle(self) -> bool:
        """Whether one more microbatch would give the peer more to do now: the microbatch need not wait, and fits in
        memory."""
        hop = self._context.hop
        return not (
            not self._count.lacks_work
            or self._setting.num_waiting
            or self._records.answers.num_written
            or (hop is not None and hop.is_held_up)
            or not self._context.backend.function.has_room()
        )
