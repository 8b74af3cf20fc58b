"""The window grows while the swarm keeps up, and shrinks when it does not."""

from collections import Counter

import pytest

from swarm.pipeline.trainer_paths import Window, Windows


def test_a_full_window_nearly_doubles_in_a_round_trip_until_somebody_is_busy() -> None:
    window = Window(start=16, largest=64)
    for _ in range(16):
        window.finished(num_busy=0, in_flight=window.size)
    assert window.size == 30


def test_then_it_grows_by_about_one_in_the_next_round_trip() -> None:
    window = Window(start=20, largest=64)
    window.finished(num_busy=1, in_flight=1)
    assert window.size == 18
    for _ in range(18):
        window.finished(num_busy=0, in_flight=window.size)
    assert window.size == 19


def test_it_soon_finds_the_room_that_another_trainer_has_left() -> None:
    window, capacity = Window(start=6, largest=256), 10
    for _ in range(500):
        window.finished(num_busy=int(window.size > capacity), in_flight=window.size)
    capacity, num_answers = 40, 0
    while window.size < capacity:
        window.finished(num_busy=int(window.size > capacity), in_flight=window.size)
        num_answers += 1
    assert num_answers < 100, "not the hundreds that one more in each round trip would take"


def test_those_that_were_refused_together_shrink_it_once() -> None:
    window = Window(start=20, largest=64)
    for left in range(20, 0, -1):
        window.finished(num_busy=1, in_flight=left)
    assert window.size == 18
    window.finished(num_busy=1, in_flight=18)
    assert window.size == 17


def test_a_window_that_is_not_full_proves_nothing() -> None:
    window = Window(start=4, largest=64)
    for _ in range(100):
        window.finished(num_busy=0, in_flight=3)
    assert window.size == 4


def test_busy_shrinks_down_to_one_and_no_further() -> None:
    window = Window(start=20, largest=64)
    window.finished(num_busy=3, in_flight=20)
    assert window.size == 18
    for _ in range(100):
        window.finished(num_busy=1, in_flight=1)
    assert window.size == 1


def test_it_never_exceeds_the_largest() -> None:
    window = Window(start=2, largest=5)
    for _ in range(200):
        window.finished(num_busy=0, in_flight=window.size)
    assert window.size == 5


@pytest.mark.parametrize("capacity", [3, 10, 40])
def test_it_settles_near_what_the_swarm_takes(capacity: int) -> None:
    """A swarm that answers Busy beyond `capacity` is neither starved nor flooded."""
    window = Window(start=6, largest=256)
    sizes = []
    for _ in range(2000):
        window.finished(num_busy=int(window.size > capacity), in_flight=window.size)
        sizes.append(window.size)
    settled = sizes[1000:]
    assert max(settled) <= capacity + 1
    assert sum(settled) / len(settled) > 0.7 * capacity


def test_it_never_exceeds_what_the_user_allows() -> None:
    window = Window(start=6, largest=2)
    assert window.size == 2
    window.finished(num_busy=0, in_flight=2)
    assert window.size == 2


def test_each_path_is_wanted_as_often_as_its_window_has_room() -> None:
    windows = Windows([0, 1, 2], num_stages=2, max_in_flight=30)
    for _ in range(16):
        windows.finished(0, num_busy=0, in_flight=windows.size(0))
        windows.finished(1, num_busy=1, in_flight=1)
    assert [windows.size(path) for path in range(3)] == [10, 1, 4], "of 30 in flight each path may have 10"
    held = Counter({0: 7, 1: 5})
    assert windows.wish([0, 1, 2], held) == [0, 2, 0, 2, 0, 2, 2]
    assert windows.wish([1, 2], held, ahead=0.5) == [2] * 6
    assert windows.wish([], held) == []


def test_each_path_has_at_least_one_in_flight() -> None:
    windows = Windows([0, 1, 2], num_stages=2, max_in_flight=2)
    assert [windows.size(path) for path in range(3)] == [1, 1, 1]
