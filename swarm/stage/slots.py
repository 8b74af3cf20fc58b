"""The slots of a stage peer: decides how many there are, and which caller gets one when there are not enough for all.

A peer takes as many microbatches as keep it busy, wherever they are. On
a fast network a few are enough. Over long or slow links most microbatches are on their way somewhere, so more are
needed for the same work. So one slot is added when a caller has to be refused while the peer has next to nothing to do.
While work piles up the number slowly falls again. Meanwhile only the least number of slots is given out, so that no
work waits here that another peer could do.

Each caller may take slots that no other caller wants. After a caller was refused, a slot is reserved for it, which
callers with clearly more slots cannot take. The reservation ends when the caller comes again, or after some time. So
one caller cannot take the others' share by many requests. A caller that has other peers to ask gets no slot while
something waits here already. In this way work finds idle peers, even among many callers that know nothing of each
other. Nothing here waits: a refused caller asks again.
"""

from collections import Counter
from collections.abc import Callable

from swarm.errors import Overloaded
from swarm.machine.clock import Clock
from swarm.machine.words import counted

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
        """Microbatches that may be in flight here now."""
        return max(0, min(self._most(), self.least if self._piles_up() else int(self._learnt)))

    @property
    def lacks_work(self) -> bool:
        """Whether the tasks at the compute thread will not keep it busy for long."""
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
