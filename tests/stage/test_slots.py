"""Slots: their number keeps a peer busy, and they are shared fairly among callers."""

import heapq
import itertools
from collections import deque
from contextlib import nullcontext
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


def test_while_work_piles_up_there_are_no_more_than_the_least() -> None:
    """A refused caller goes to another peer, and less is lost if this peer dies."""
    queue_length = 0
    count = SlotCount(4, 64, lambda: queue_length)
    for _ in range(16):
        count.refused(idle=True)
    queue_length = PILE
    assert count.size == 4
    queue_length = PILE - 1
    assert count.size == 20


def test_a_least_that_is_more_than_the_largest_stays() -> None:
    count = SlotCount(16, 0, lambda: 0)
    count.refused(idle=True)
    assert count.size == 16


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


def test_with_a_fixed_number_it_is_not() -> None:
    network = _Network(compute_seconds=0.02, away_seconds=0.5, largest=4)
    assert network.run(seconds=40.0) == pytest.approx(4 * 0.02 / 0.52, rel=0.1)


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


def test_one_caller_alone_may_take_all() -> None:
    slots = Slots(_count(3), ManualClock())
    assert [_taken(slots, "a") for _ in range(4)] == [True, True, True, False]
    slots.give_back("a")
    assert (slots.num_held, slots.num_free) == (2, 1)
    assert _taken(slots, "a")


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


def test_equals_do_not_wait_for_each_other() -> None:
    slots = Slots(_count(3), ManualClock())
    assert [_taken(slots, caller) for caller in "abab"] == [True, True, True, False]
    slots.give_back("a")
    assert _taken(slots, "a")


def test_newcomers_are_never_kept_from_a_free_slot_by_each_other() -> None:
    slots = Slots(_count(1), ManualClock())
    assert _taken(slots, "a")
    assert not _taken(slots, "b")
    assert not _taken(slots, "c")
    slots.give_back("a")
    assert _taken(slots, "d")
    with pytest.raises(Overloaded, match="1 microbatch in flight"):
        slots.take("b", busy_seconds=RETRY)


def test_who_would_find_the_peer_idle_gets_one_more_slot() -> None:
    slots = Slots(_count(2, largest=3), ManualClock())
    assert [_taken(slots, "a") for _ in range(3)] == [True, True, False]
    assert [_taken(slots, "a", idle=True) for _ in range(2)] == [True, False]


def test_a_flood_that_leaves_the_peer_idle_gets_no_slot_that_is_kept_for_another() -> None:
    count = _count(2, largest=64)
    slots = Slots(count, ManualClock())
    assert [_taken(slots, "flood") for _ in range(2)] == [True, True]
    assert not _taken(slots, "quiet")
    assert not any(_taken(slots, "flood", idle=True) for _ in range(100))
    assert count.size == 3, "the one that is kept"
    assert _taken(slots, "quiet")


def test_a_reply_grants_one_free_slot_at_most() -> None:
    slots = Slots(_count(2), ManualClock())
    granted = [slots.grants(has_others=False)]
    for _ in range(2):
        slots.take("a", busy_seconds=0.0)
        granted.append(slots.grants(has_others=False))
    assert granted == [1, 1, 0]


@pytest.mark.parametrize(("queue_length", "taken"), [(0, True), (1, True), (2, False), (9, False)])
def test_who_has_other_peers_to_ask_is_left_to_them_while_something_waits_here(queue_length: int, taken: bool) -> None:
    slots = Slots(SlotCount(9, 9, lambda: queue_length), ManualClock())
    assert slots.grants(has_others=True) == taken
    with nullcontext() if taken else pytest.raises(Overloaded, match="work waits here already"):
        slots.take("a", busy_seconds=RETRY, has_others=True)
    assert slots.num_held == taken
    slots.take("a", busy_seconds=RETRY)
    assert slots.grants(has_others=False) == 1


def test_nothing_is_kept_for_who_was_left_to_others() -> None:
    queue_length = 2
    count = SlotCount(4, 64, lambda: queue_length)
    slots = Slots(count, ManualClock())
    for _ in range(9):
        with pytest.raises(Overloaded):
            slots.take("b", busy_seconds=RETRY, idle=True, has_others=True)
    queue_length = 0
    assert [_taken(slots, "a") for _ in range(4)] == [True] * 4, "nor do slots grow by it"
    assert count.size == 4
