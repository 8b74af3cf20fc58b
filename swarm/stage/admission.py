"""The slots of a stage: who gets one when there are not enough for all.

Used by stage/stage. Everybody may take what nobody else wants, beyond the few no faster than the peer can make use of;
once somebody was refused, a slot is kept for him from those who hold clearly more, until he has come again or his time
is over. So a flood of one caller leaves the others their share. Who has other peers to ask gets none while something
waits here already: among many who know nothing of each other, work finds idle peers by being sent on. Never waits: who
is refused asks again.
"""

import math
from collections import Counter

from swarm.errors import Overloaded
from swarm.machine.clock import Clock
from swarm.stage.slots import Slots

PATIENCE_SECONDS = 0.5
"""How long a slot is kept, beyond twice the seconds after which the refused caller was told to come again: lines are
slow, and so are busy machines."""
SHORTEST_RETRY_SECONDS = 0.02
LONGEST_RETRY_SECONDS = 1.0
CLEARLY_MORE = 2
"""By so many slots. One more or less is how it falls out among equals."""


class Admission:
    """Gives out slots."""

    def __init__(self, slots: Slots, clock: Clock) -> None:
        self._slots = slots
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._refused: dict[str, float] = {}
        """Callers who were refused, and until when a slot is kept for them."""
        self._open_at = -math.inf
        """From when on the next slot beyond the few is given out."""

    @property
    def num_held(self) -> int:
        """Slots that are taken."""
        return self._held.total()

    @property
    def num_free(self) -> int:
        """Slots that somebody would get now; less than none while there are fewer than there were."""
        is_open = not self._is_beyond or self._clock.monotonic() >= self._open_at
        return self._num_left if is_open else min(0, self._num_left)

    @property
    def _num_left(self) -> int:
        return self._slots.size - self.num_held

    @property
    def _is_beyond(self) -> bool:
        """Whether the few are taken."""
        return self.num_held >= self._slots.least

    def grants(self, *, has_others: bool) -> int:
        """What a reply grants: of the free slots one at most, since all who get a reply are told of the same ones."""
        return 0 if has_others and self._slots.has_enough else max(0, min(1, self.num_free))

    def take(self, caller: str, *, busy_seconds: float, idle: bool = False, has_others: bool = False) -> None:
        """Take a slot; `give_back` frees it.

        Args:
            busy_seconds: how long a microbatch keeps the peer busy; 0 if that is not known yet. Of those beyond the few
                it takes twice as many as it can do in that time, and no more: many at once, as where a peer fails that
                had them, would wait here while another peer has nothing to do.
            idle: whether the peer has nothing to do, in spite of those who have slots.
            has_others: whether the caller knows peers that it has not asked.

        Raises:
            Overloaded: there is no slot for this caller now.
        """
        if has_others and self._slots.has_enough:
            # Nothing is kept for this caller, which goes elsewhere. By then about one task is done.
            raise Overloaded("work waits here already", retry_after_seconds=_retry_seconds(busy_seconds / 2))
        if self._num_left <= 0:
            self._slots.refused(idle=idle)
        now = self._clock.monotonic()
        self._refused = {other: until for other, until in self._refused.items() if until > now}
        own = self._held[caller]
        num_kept = sum(own - self._held[other] >= CLEARLY_MORE for other in self._refused if other != caller)
        is_beyond, gap_seconds = self._is_beyond, busy_seconds / 2
        is_burst = is_beyond and now < self._open_at + num_kept * gap_seconds
        if self._num_left <= num_kept or is_burst:
            retry_seconds = _retry_seconds(busy_seconds)
            self._refused[caller] = now + PATIENCE_SECONDS + 2 * retry_seconds
            reason = f"{self.num_held} microbatches are in flight"
            raise Overloaded(reason, retry_after_seconds=retry_seconds)
        self._refused.pop(caller, None)
        self._held[caller] += 1
        if is_beyond:
            self._open_at = max(now, self._open_at + gap_seconds)

    def give_back(self, caller: str) -> None:
        """Free a slot that the caller took."""
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]


def _retry_seconds(busy_seconds: float) -> float:
    return min(max(busy_seconds, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)
