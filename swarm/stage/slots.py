"""The slots of a stage peer: how many there are, and who gets one when there are not enough for all.

Used by stage/admission, and by the simulator. A peer takes as many microbatches as keep it busy, wherever they wait. On
a fast network a few do. Over long or slow links most of them are on their way somewhere, and more are needed for the
same work. So there is one more slot when a caller has to be refused while the peer has next to nothing to do, and there
are fewer again while work piles up: for the moment no more than the few, so that nothing waits here that another peer
could do.

Each caller may take what nobody else wants. Once a caller was refused, a slot is kept for it from those that hold
clearly more, until it has come again or its time is over. So a flood of one caller leaves the others their share. A
caller that has other peers to ask gets none while something waits here already: among many that know nothing of each
other, work finds idle peers by being sent on. Nothing here waits: a caller that was refused asks again.
"""

from collections import Counter
from collections.abc import Callable

from swarm.errors import Overloaded
from swarm.machine.clock import Clock
from swarm.machine.words import counted

LARGEST_NUM_SLOTS = 64
"""The most slots that are learnt. Each holds the tensors that came in and, as long as there is memory, a graph."""
FEW = 2
"""So many tasks at the compute thread, the running one included, do not keep it busy for long."""
PILE = 4
"""So many tasks are more than it takes."""
PATIENCE_SECONDS = 0.5
"""How long a slot is kept, beyond twice the seconds after which the refused caller was told to come again: lines are
slow, and so are busy machines."""
SHORTEST_RETRY_SECONDS = 0.02
LONGEST_RETRY_SECONDS = 1.0
CLEARLY_MORE = 2
"""By how many slots a number is clearly larger. One more or less is how it falls out among equals."""


class SlotCount:
    """How many slots there are: it grows fast and shrinks slowly, for an idle peer costs more than a short queue.

    Args:
        queue_length: tells how many tasks are at the compute thread, the running one included.
        room: tells how many microbatches may be in flight for another reason than how busy the peer is; None: any
            number.
    """

    def __init__(
        self, least: int, largest: int, queue_length: Callable[[], int], room: Callable[[], int | None] = lambda: None
    ) -> None:
        self._learnt = float(least)
        self.least = least
        """There are always so many slots, as far as there is room."""
        self._largest = max(least, largest)
        self._queue_length = queue_length
        self._room = room

    @property
    def size(self) -> int:
        """Microbatches that may be in flight here now."""
        return max(0, min(self._most(), self.least if self._piles_up() else int(self._learnt)))

    @property
    def lacks_work(self) -> bool:
        """Whether what is at the compute thread does not keep it busy for long."""
        return self._queue_length() <= FEW

    @property
    def has_enough(self) -> bool:
        """Whether something waits for the compute thread: what comes now would be done sooner where nothing does."""
        return self._queue_length() >= FEW

    def refused(self, *, idle: bool) -> None:
        """All slots are taken and a caller wanted one; `idle`: the peer has nothing to do, though it has all these."""
        if idle and int(self._learnt) <= self._most():
            self._learnt = min(float(self._largest), self._learnt + 1.0)

    def freed(self) -> None:
        """One slot was given back."""
        if self._piles_up():
            # By about one in the time in which each of them is used once.
            self._learnt = max(float(self.least), self._learnt - 1.0 / self._learnt)

    def _most(self) -> int:
        room = self._room()
        return self._largest if room is None else room

    def _piles_up(self) -> bool:
        return self._queue_length() >= PILE


class Slots:
    """Who has the slots, of which there are as many as `count` says."""

    def __init__(self, count: SlotCount, clock: Clock) -> None:
        self._count = count
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._refused: dict[str, float] = {}
        """Callers that were refused, and until when a slot is kept for them."""

    @property
    def num_held(self) -> int:
        """Slots that are taken."""
        return self._held.total()

    @property
    def num_free(self) -> int:
        """Slots that a caller would get now; less than none while there are fewer than there were."""
        return self._count.size - self.num_held

    def grants(self, *, has_others: bool) -> int:
        """What a reply grants: of the free slots one at most, since all that get a reply are told of the same ones."""
        return 0 if has_others and self._count.has_enough else max(0, min(1, self.num_free))

    def take(self, caller: str, *, busy_seconds: float, idle: bool = False, has_others: bool = False) -> None:
        """Take a slot; `give_back` frees it.

        Args:
            busy_seconds: how long a microbatch keeps the peer busy; 0 if that is not known yet.
            idle: whether the peer has nothing to do, in spite of all that have slots.
            has_others: whether the caller knows peers that it has not asked.

        Raises:
            Overloaded: there is no slot for this caller now.
        """
        if has_others and self._count.has_enough:
            # Nothing is kept for this caller, which goes elsewhere. By then about one task is done.
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

    def give_back(self, caller: str) -> None:
        """Free a slot that the caller took."""
        self._count.freed()
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]


def _retry_seconds(busy_seconds: float) -> float:
    return min(max(busy_seconds, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)
