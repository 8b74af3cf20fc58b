"""Slots: their number keeps a peer busy, and they are shared fairly among callers."""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

import pytest

from swarm.errors import Overloaded
from swarm.pipeline.trainer_paths import Window
from swarm.stage.admission import FEW, PATIENCE_SECONDS, PILE, SHORTEST_RETRY_SECONDS, SlotCount, Slots
from tests.support.manual_clock import ManualClock


def test_slots_grow_for_who_is_refused_by_an_idle_peer_and_only_so_far() -> None:
    count = SlotCount(4, 6, lambda: 0)
    count.refused(idle=False)
    assert count.size == 4
    for _ in range(10):
        count.refused(idle=True)
    assert count.size == 6


def test_slots_shrink_slowly_while_work_piles_up_and_never_below_the_least() -> None:
    queue_length = PILE - 1
    count = SlotCount(4, 64, lambda: queue_length)
    for _ in range(16):
        count.refused(idle=True)
    for _ in range(20):
        count.freed()
    assert count.size == 20
    queue_length = PILE
    for _ in range(20):
        count.freed()
    queue_length = 0
    assert count.size in (18, 19), "by about one, when each has been used once"
    queue_length = PILE
    for _ in range(1000):
        count.freed()
    queue_length = 0
    assert count.size == 4


@dataclass
class _Network:
    """A trainer with its window, and one peer behind a long line, on injected time.

    A microbatch gets a slot, waits for the peer's one thread, is computed, is away while later stages compute, and
    comes back.
    """

    compute_seconds: float
    away_seconds: float
    largest: int
    clock: ManualClock = field(default_factory=ManualClock)
    largest_queue: int = 0
    count: SlotCount = field(init=False)

    def run(self, seconds: float) -> float:
        """The share of time in which the peer computed."""
        events: list[tuple[float, int, str, int]] = []
        orders = itertools.count()
        queue: deque[int] = deque()
        refused: dict[int, int] = {}
        computing, number, in_flight, busy_seconds = False, 0, 0, 0.0
        self.count = SlotCount(4, self.largest, lambda: len(queue) + computing)
        window, slots = Window(start=4, largest=256), Slots(self.count, self.clock)

        def later(seconds: float, kind: str, index: int) -> None:
            heapq.heappush(events, (self.clock.monotonic() + seconds, next(orders), kind, index))

        while self.clock.monotonic() < seconds:
            while in_flight < window.size:
                later(0.0, "ask", number)
                number, in_flight = number + 1, in_flight + 1
            if queue and not computing:
                computing = True
                later(self.compute_seconds, "computed", queue.popleft())
            at, _, kind, index = heapq.heappop(events)
            self.clock.advance(at - self.clock.monotonic())
            if kind == "ask":
                try:
                    slots.take("trainer", busy_seconds=0.02, idle=len(queue) + computing <= FEW)
                    queue.append(index)
                    self.largest_queue = max(self.largest_queue, len(queue))
                except Overloaded as busy:
                    refused[index] = refused.get(index, 0) + 1
                    later(busy.retry_after_seconds, "ask", index)
            elif kind == "computed":
                computing = False
                busy_seconds += self.compute_seconds
                later(self.away_seconds, "back", index)
            else:
                slots.give_back("trainer")
                window.finished(num_busy=refused.pop(index, 0), in_flight=in_flight)
                in_flight -= 1
        return busy_seconds / seconds


@pytest.mark.parametrize("away_seconds", [0.05, 0.2, 0.5])
def test_a_peer_is_kept_busy_however_long_its_microbatches_are_away(away_seconds: float) -> None:
    """Each takes 20 ms to compute, so up to 26 microbatches are needed. The peer has to find this number itself."""
    network = _Network(compute_seconds=0.02, away_seconds=away_seconds, largest=64)
    assert network.run(seconds=40.0) > 0.85
    assert network.count.size <= 4 + 1.3 * away_seconds / 0.02
    assert network.largest_queue <= PILE


# -- who gets one -----------------------------------------------------------------------------------------------------

RETRY = 0.5


def _count(number: int, largest: int = 0) -> SlotCount:
    return SlotCount(number, largest, lambda: 0)


def _grown(least: int, size: int) -> SlotCount:
    count = _count(least, largest=size)
    while count.size < size:
        count.refused(idle=True)
    return count


def _taken(slots: Slots, caller: str, *, idle: bool = False) -> bool:
    try:
        slots.take(caller, busy_seconds=RETRY, idle=idle)
    except Overloaded as busy:
        return busy.retry_after_seconds != RETRY
    return True


def test_a_flood_leaves_the_others_their_share() -> None:
    """One caller asks for more whenever anything changes. Another one asks only now and then."""
    clock = ManualClock()
    slots = Slots(_count(4), clock)
    while _taken(slots, "flood"):
        pass
    assert not _taken(slots, "quiet")
    slots.give_back("flood")
    assert not any(_taken(slots, "flood") for _ in range(100))
    clock.advance(RETRY)
    assert _taken(slots, "quiet")
    # Three to one is clearly more, and two to one is not: then the caller that comes first gets the slot.
    assert not _taken(slots, "quiet")
    slots.give_back("flood")
    assert _taken(slots, "quiet")
    slots.give_back("flood")
    assert _taken(slots, "flood")


def test_a_peer_that_does_not_know_its_speed_yet_gives_out_all_it_has() -> None:
    slots = Slots(_grown(2, 8), ManualClock())
    for _ in range(8):
        slots.take("a", busy_seconds=0.0)
    with pytest.raises(Overloaded) as refused:
        slots.take("a", busy_seconds=0.0)
    assert refused.value.retry_after_seconds == SHORTEST_RETRY_SECONDS


def test_a_slot_is_not_kept_for_somebody_who_went_elsewhere() -> None:
    clock = ManualClock()
    slots = Slots(_count(3), clock)
    assert [_taken(slots, "a") for _ in range(3)] == [True] * 3
    assert not _taken(slots, "b")
    slots.give_back("a")
    assert not _taken(slots, "a")
    clock.advance(PATIENCE_SECONDS + 2 * RETRY)
    assert _taken(slots, "a")
