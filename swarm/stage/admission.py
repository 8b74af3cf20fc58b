"""Whether a stage peer takes a microbatch: whether it serves, has memory, and has a slot for its caller.

Used by stage/servicer. How many slots there are and who gets one is in stage/slots, what the peer does when its memory
runs out in stage/shortage, and which rounds are taken in the setting. Nothing here waits: a caller that was refused
asks again.
"""

import asyncio
from typing import NamedTuple

from swarm.errors import Fatal, NotReady, Overloaded
from swarm.stage.context import StageContext
from swarm.stage.present_round import PresentRound
from swarm.stage.records import Records
from swarm.stage.setting import Setting
from swarm.stage.shortage import Shortage
from swarm.stage.slots import SlotCount, Slots
from swarm.training.microbatch import Microbatch

SHORTAGE_RETRY_SECONDS = 0.2
"""How long a microbatch waits before it is offered again to a peer that has no memory for more than it has."""


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
    """What one peer decides about microbatches that are offered to it."""

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
        """By Setting.queue_of their microbatches' rounds."""
        self._shortage = Shortage(context.stage, context.backend.budget)
        self._has_given_up = asyncio.Event()
        self.is_open = False
        """Whether microbatches, and sessions, are taken at all."""

    # -- for the program ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Admit microbatches from now on."""
        self.is_open = True

    def close(self) -> None:
        """Admit none until `open` is called: the peer is joining or leaving, as it was at first."""
        self.is_open = False

    @property
    def fault(self) -> Fatal | None:
        """Why this peer cannot go on, once it has given up."""
        return self._shortage.fault

    async def gives_up(self) -> None:
        """Return once this peer cannot go on, for want of memory."""
        await self._has_given_up.wait()

    # -- for calls ---------------------------------------------------------------------------------------------------

    @property
    def num_admitted(self) -> int:
        """Microbatches admitted and not finished."""
        return sum(slots.num_held for slots in self._slots.values())

    def grants(self, *, has_others: bool) -> int:
        """What a reply grants for the current round; see Slots."""
        slots = self._slots_of(self._setting.queue_of(self._round.number))
        return 0 if self._lacks_memory(slots) else slots.grants(has_others=has_others)

    def admit(self, microbatch: Microbatch, caller: str = "", *, has_others: bool = False) -> Slot:
        """Take a slot for a caller's microbatch, unless it had better ask another peer; give it back with `leave`.

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
        # One of the next round waits for the end of this one, however little there is to do.
        idle = microbatch.round <= self._round.number and self._is_idle
        busy_seconds = (self._records.seconds_per_sample.value or 0.0) * microbatch.num_samples
        slots.take(caller, busy_seconds=busy_seconds, idle=idle, has_others=has_others)
        return Slot(queue, caller, self._shortage.num_reductions)

    def leave(self, slot: Slot) -> None:
        """Give a slot back."""
        self._slots[slot.queue].give_back(slot.caller)

    def ran_out_of_memory(self, error: Exception, slot: Slot) -> None:
        """A microbatch that has this slot failed for want of memory: less is taken, or the peer gives up."""
        in_flight = self._slots_of(slot.queue).num_held
        self._shortage.failed(error, num_reductions=slot.num_reductions, in_flight=in_flight)
        if self._shortage.fault is not None:
            self._has_given_up.set()

    def had_memory(self) -> None:
        """A microbatch was computed."""
        self._shortage.succeeded()

    def _slots_of(self, queue: int) -> Slots:
        return self._slots.get(queue) or Slots(self._count, self._context.clock)

    def _lacks_memory(self, slots: Slots) -> bool:
        """Whether memory ran out with no more microbatches than there are now."""
        return slots.num_held >= self._shortage.most_in_flight

    @property
    def _is_idle(self) -> bool:
        """Whether more microbatches would have the peer do more: they would wait for nothing here, and fit."""
        hop = self._context.hop
        return not (
            not self._count.lacks_work
            or self._setting.num_waiting
            or self._records.answers.num_written
            or (hop is not None and hop.is_held_up)
            or not self._context.backend.budget.has_room()
        )
