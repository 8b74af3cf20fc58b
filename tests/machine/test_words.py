"""Which lines are logged again, and when."""

from swarm.machine.words import MOST_KEPT, Repeats
from tests.support.manual_clock import ManualClock


def test_an_event_is_counted_until_its_line_is_due_again() -> None:
    clock = ManualClock()
    repeats = Repeats(clock, every_seconds=10.0)
    assert [repeats.count("a") for _ in range(3)] == [1, 0, 0]
    assert repeats.count("b") == 1
    clock.advance(10.0)
    assert [repeats.count("a"), repeats.count("a")] == [3, 0]
    clock.advance(10.0)
    assert [repeats.count("a"), repeats.count("b")] == [2, 1]


def test_any_number_of_kinds_takes_bounded_memory() -> None:
    repeats = Repeats(ManualClock())
    assert all(repeats.count(number) == 1 for number in range(2 * MOST_KEPT))
    assert repeats.count(0) == 1, "it was forgotten"
    assert repeats.count(2 * MOST_KEPT - 1) == 0
