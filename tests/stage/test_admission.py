"""Slots, and who gets them."""

import pytest

from swarm.clock import ManualClock
from swarm.errors import Overloaded
from swarm.stage.admission import PATIENCE_SECONDS, Admission

RETRY = 0.5


def _taken(admission: Admission, caller: str) -> bool:
    try:
        admission.take(caller, retry_after_seconds=RETRY)
    except Overloaded as busy:
        return busy.retry_after_seconds != RETRY
    return True


def test_one_caller_alone_may_take_all() -> None:
    admission = Admission(3, ManualClock())
    assert [_taken(admission, "a") for _ in range(4)] == [True, True, True, False]
    admission.give_back("a")
    assert (admission.num_held, admission.num_free) == (2, 1)
    assert _taken(admission, "a")


def test_a_flood_leaves_the_others_their_share() -> None:
    """Somebody asks for more whenever anything changes; another one asks once in a while."""
    clock = ManualClock()
    admission = Admission(4, clock)
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


def test_a_slot_is_not_kept_for_somebody_who_went_elsewhere() -> None:
    clock = ManualClock()
    admission = Admission(3, clock)
    assert [_taken(admission, "a") for _ in range(3)] == [True] * 3
    assert not _taken(admission, "b")
    admission.give_back("a")
    assert not _taken(admission, "a")
    clock.advance(PATIENCE_SECONDS + 2 * RETRY)
    assert _taken(admission, "a")


def test_equals_do_not_wait_for_each_other() -> None:
    admission = Admission(3, ManualClock())
    assert [_taken(admission, caller) for caller in "abab"] == [True, True, True, False]
    admission.give_back("a")
    assert _taken(admission, "a")


def test_newcomers_are_never_kept_from_a_free_slot_by_each_other() -> None:
    admission = Admission(1, ManualClock())
    assert _taken(admission, "a")
    assert not _taken(admission, "b")
    assert not _taken(admission, "c")
    admission.give_back("a")
    assert _taken(admission, "d")
    with pytest.raises(Overloaded, match="1 microbatches are in flight"):
        admission.take("b", retry_after_seconds=RETRY)
