"""Slots, and who gets them."""

from contextlib import nullcontext

import pytest

from swarm.errors import Overloaded
from swarm.machine.clock import ManualClock
from swarm.stage.admission import PATIENCE_SECONDS, SHORTEST_RETRY_SECONDS, Admission
from swarm.stage.slots import Slots

RETRY = 0.5


def _slots(number: int, largest: int = 0) -> Slots:
    return Slots(number, largest, lambda: 0)


def _grown(least: int, size: int) -> Slots:
    slots = _slots(least, largest=size)
    while slots.size < size:
        slots.refused(idle=True)
    return slots


def _taken(admission: Admission, caller: str, *, idle: bool = False) -> bool:
    try:
        admission.take(caller, busy_seconds=RETRY, idle=idle)
    except Overloaded as busy:
        return busy.retry_after_seconds != RETRY
    return True


def test_one_caller_alone_may_take_all() -> None:
    admission = Admission(_slots(3), ManualClock())
    assert [_taken(admission, "a") for _ in range(4)] == [True, True, True, False]
    admission.give_back("a")
    assert (admission.num_held, admission.num_free) == (2, 1)
    assert _taken(admission, "a")


def test_a_flood_leaves_the_others_their_share() -> None:
    """Somebody asks for more whenever anything changes; another one asks once in a while."""
    clock = ManualClock()
    admission = Admission(_slots(4), clock)
    while _taken(admission, "flood"):
        pass
    assert not _taken(admission, "quiet")
    admission.give_back("flood")
    assert not any(_taken(admission, "flood") for _ in range(100))
    clock.advance(RETRY)
    assert _taken(admission, "quiet")
    # Three to one is clearly more, two to one is not: it falls to whoever comes first.
    assert not _taken(admission, "quiet")
    admission.give_back("flood")
    assert _taken(admission, "quiet")
    admission.give_back("flood")
    assert _taken(admission, "flood")


def test_many_at_once_are_taken_no_faster_than_twice_what_the_peer_can_do() -> None:
    """Though it has learnt that it needs many slots: another peer may do them sooner."""
    clock = ManualClock()
    admission = Admission(_grown(2, 20), clock)
    assert sum(_taken(admission, "a") for _ in range(20)) == 2 + 2
    clock.advance(RETRY)
    assert sum(_taken(admission, "a") for _ in range(20)) == 2
    clock.advance(10 * RETRY)
    assert sum(_taken(admission, "a") for _ in range(20)) == 2
    for _ in range(8):
        admission.give_back("a")
    assert sum(_taken(admission, "a") for _ in range(20)) == 2, "the few, at any time"


def test_a_flood_does_not_take_each_slot_beyond_the_few_as_it_is_due() -> None:
    """It asks all the time, and the other one when it was told to."""
    clock = ManualClock()
    admission = Admission(_grown(2, 64), clock)
    while _taken(admission, "flood"):
        pass
    assert not _taken(admission, "quiet")
    for _ in range(50):
        clock.advance(RETRY / 50)
        _taken(admission, "flood")
    assert _taken(admission, "quiet")


def test_no_slot_is_free_to_be_credited_while_the_next_one_is_not_due() -> None:
    clock = ManualClock()
    admission = Admission(_grown(2, 8), clock)
    while _taken(admission, "a"):
        pass
    assert (admission.num_held, admission.num_free) == (4, 0)
    clock.advance(RETRY / 2)
    assert admission.num_free == 4


def test_a_peer_that_does_not_know_its_speed_yet_gives_out_all_it_has() -> None:
    admission = Admission(_grown(2, 8), ManualClock())
    for _ in range(8):
        admission.take("a", busy_seconds=0.0)
    with pytest.raises(Overloaded) as refused:
        admission.take("a", busy_seconds=0.0)
    assert refused.value.retry_after_seconds == SHORTEST_RETRY_SECONDS


def test_a_slot_is_not_kept_for_somebody_who_went_elsewhere() -> None:
    clock = ManualClock()
    admission = Admission(_slots(3), clock)
    assert [_taken(admission, "a") for _ in range(3)] == [True] * 3
    assert not _taken(admission, "b")
    admission.give_back("a")
    assert not _taken(admission, "a")
    clock.advance(PATIENCE_SECONDS + 2 * RETRY)
    assert _taken(admission, "a")


def test_equals_do_not_wait_for_each_other() -> None:
    admission = Admission(_slots(3), ManualClock())
    assert [_taken(admission, caller) for caller in "abab"] == [True, True, True, False]
    admission.give_back("a")
    assert _taken(admission, "a")


def test_newcomers_are_never_kept_from_a_free_slot_by_each_other() -> None:
    admission = Admission(_slots(1), ManualClock())
    assert _taken(admission, "a")
    assert not _taken(admission, "b")
    assert not _taken(admission, "c")
    admission.give_back("a")
    assert _taken(admission, "d")
    with pytest.raises(Overloaded, match="1 microbatches are in flight"):
        admission.take("b", busy_seconds=RETRY)


def test_who_would_find_the_peer_idle_gets_one_more_slot() -> None:
    admission = Admission(_slots(2, largest=3), ManualClock())
    assert [_taken(admission, "a") for _ in range(3)] == [True, True, False]
    assert [_taken(admission, "a", idle=True) for _ in range(2)] == [True, False]


def test_a_flood_that_leaves_the_peer_idle_gets_no_slot_that_is_kept_for_another() -> None:
    slots = _slots(2, largest=64)
    admission = Admission(slots, ManualClock())
    assert [_taken(admission, "flood") for _ in range(2)] == [True, True]
    assert not _taken(admission, "quiet")
    assert not any(_taken(admission, "flood", idle=True) for _ in range(100))
    assert slots.size == 3, "the one that is kept"
    assert _taken(admission, "quiet")


def test_a_reply_grants_one_free_slot_at_most() -> None:
    admission = Admission(_slots(2), ManualClock())
    granted = [admission.grants(has_others=False)]
    for _ in range(2):
        admission.take("a", busy_seconds=0.0)
        granted.append(admission.grants(has_others=False))
    assert granted == [1, 1, 0]


@pytest.mark.parametrize(("queue_length", "taken"), [(0, True), (1, True), (2, False), (9, False)])
def test_who_has_other_peers_to_ask_is_left_to_them_while_something_waits_here(queue_length: int, taken: bool) -> None:
    admission = Admission(Slots(9, 9, lambda: queue_length), ManualClock())
    assert admission.grants(has_others=True) == taken
    with nullcontext() if taken else pytest.raises(Overloaded, match="work waits here already"):
        admission.take("a", busy_seconds=RETRY, has_others=True)
    assert admission.num_held == taken
    admission.take("a", busy_seconds=RETRY)
    assert admission.grants(has_others=False) == 1


def test_nothing_is_kept_for_who_was_left_to_others() -> None:
    queue_length = 2
    slots = Slots(4, 64, lambda: queue_length)
    admission = Admission(slots, ManualClock())
    for _ in range(9):
        with pytest.raises(Overloaded):
            admission.take("b", busy_seconds=RETRY, idle=True, has_others=True)
    queue_length = 0
    assert [_taken(admission, "a") for _ in range(4)] == [True] * 4, "nor do slots grow by it"
    assert slots.size == 4
