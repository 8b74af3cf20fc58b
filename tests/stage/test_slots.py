"""Slots: as many as keep a peer busy."""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

import pytest

from swarm.errors import Overloaded
from swarm.machine.clock import ManualClock
from swarm.pipeline.window import Window
from swarm.stage.admission import Admission
from swarm.stage.slots import FEW, PILE, Slots


def test_slots_grow_for_who_is_refused_by_an_idle_peer_and_only_so_far() -> None:
    slots = Slots(4, 6, lambda: 0)
    slots.refused(idle=False)
    assert slots.size == 4
    for _ in range(10):
        slots.refused(idle=True)
    assert slots.size == 6


def test_slots_shrink_slowly_while_work_piles_up_and_never_below_the_least() -> None:
    queue_length = PILE - 1
    slots = Slots(4, 64, lambda: queue_length)
    for _ in range(16):
        slots.refused(idle=True)
    for _ in range(20):
        slots.freed()
    assert slots.size == 20
    queue_length = PILE
    for _ in range(20):
        slots.freed()
    queue_length = 0
    assert slots.size in (18, 19), "by about one, when each has been used once"
    queue_length = PILE
    for _ in range(1000):
        slots.freed()
    queue_length = 0
    assert slots.size == 4


def test_while_work_piles_up_there_are_no_more_than_the_least() -> None:
    """Whoever is refused goes to another peer, and what is in flight here is not lost with this one."""
    queue_length = 0
    slots = Slots(4, 64, lambda: queue_length)
    for _ in range(16):
        slots.refused(idle=True)
    queue_length = PILE
    assert slots.size == 4
    queue_length = PILE - 1
    assert slots.size == 20


def test_a_least_that_is_more_than_the_largest_stays() -> None:
    slots = Slots(16, 0, lambda: 0)
    slots.refused(idle=True)
    assert slots.size == 16


@dataclass
class _Network:
    """A trainer with its window, and one peer behind a long line, on injected time.

    A microbatch is asked for, waits for the peer's one thread, is computed, is away for as long as later stages take
    and comes back.
    """

    compute_seconds: float
    away_seconds: float
    largest: int
    clock: ManualClock = field(default_factory=ManualClock)
    largest_queue: int = 0
    slots: Slots = field(init=False)

    def run(self, seconds: float) -> float:
        """The share of time in which the peer computed."""
        events: list[tuple[float, int, str, int]] = []
        orders = itertools.count()
        queue: deque[int] = deque()
        refused: dict[int, int] = {}
        computing, number, in_flight, busy_seconds = False, 0, 0, 0.0
        self.slots = Slots(4, self.largest, lambda: len(queue) + computing)
        window, admission = Window(start=4, largest=256), Admission(self.slots, self.clock)

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
                    admission.take("trainer", busy_seconds=0.02, idle=len(queue) + computing <= FEW)
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
                self.slots.freed()
                admission.give_back("trainer")
                window.finished(num_busy=refused.pop(index, 0), in_flight=in_flight)
                in_flight -= 1
        return busy_seconds / seconds


@pytest.mark.parametrize("away_seconds", [0.05, 0.2, 0.5])
def test_a_peer_is_kept_busy_however_long_its_microbatches_are_away(away_seconds: float) -> None:
    """20 ms of computing each: up to 26 microbatches are needed, and nobody says so."""
    network = _Network(compute_seconds=0.02, away_seconds=away_seconds, largest=64)
    assert network.run(seconds=40.0) > 0.85
    assert network.slots.size <= 4 + 1.3 * away_seconds / 0.02
    assert network.largest_queue <= PILE


def test_with_a_fixed_number_it_is_not() -> None:
    network = _Network(compute_seconds=0.02, away_seconds=0.5, largest=4)
    assert network.run(seconds=40.0) == pytest.approx(4 * 0.02 / 0.52, rel=0.1)
