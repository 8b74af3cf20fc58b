"""How many slots a stage peer has: as many microbatches as keep it busy, wherever they wait.

Used by stage/stage, which fills them (stage/admission). On a fast network a few do. Over long or slow links most of
them are on their way somewhere, and more are needed for the same work. So one more is there when somebody has to be
refused while the peer has next to nothing to do, and they get fewer again while work piles up: for the moment no more
than the few, so that nothing waits here that another peer could do. Pure.
"""

from collections.abc import Callable

LARGEST_NUM_SLOTS = 64
"""Of what is learnt. Each holds the tensors that came in and, as long as there is memory, a graph."""
FEW = 2
"""So many tasks at the compute thread, the running one included, do not keep it busy for long."""
PILE = 4
"""So many are more than it takes."""


class Slots:
    """A number between bounds, which grows fast and shrinks slowly: an idle peer costs more than a short queue.

    Args:
        queue_length: tells how many tasks are at the compute thread, the running one included.
        room: tells how many microbatches may be in flight for another reason than how busy the peer is; None: any
            number.
    """

    def __init__(
        self, least: int, largest: int, queue_length: Callable[[], int], room: Callable[[], int] | None = None
    ) -> None:
        self._size = float(least)
        self.least = least
        """So many there always are."""
        self._largest = max(least, largest)
        self._queue_length = queue_length
        self._room = room or (lambda: self._largest)

    @property
    def size(self) -> int:
        """Microbatches that may be in flight here now."""
        return max(0, min(self._room(), self.least if self._piles_up() else int(self._size)))

    @property
    def lacks_work(self) -> bool:
        """Whether what is at the compute thread does not keep it busy for long."""
        return self._queue_length() <= FEW

    @property
    def has_enough(self) -> bool:
        """Whether something waits for the compute thread: what comes now would be done sooner where nothing does."""
        return self._queue_length() >= FEW

    def refused(self, *, idle: bool) -> None:
        """All are taken and somebody wanted one; `idle`: the peer has nothing to do, though it has all these."""
        if idle and int(self._size) <= self._room():
            self._size = min(float(self._largest), self._size + 1.0)

    def freed(self) -> None:
        """One was given back."""
        if self._piles_up():
            # By about one in the time in which each of them is used once.
            self._size = max(float(self.least), self._size - 1.0 / self._size)

    def _piles_up(self) -> bool:
        return self._queue_length() >= PILE
