"""Whether a peer that is behind gets closer, and when it arrives."""

import pytest

from swarm.averaging.agreement.pace import LEAST_SECONDS, Pace


def pace(seconds: float, *, replayed: int, committed: int) -> Pace:
    """The pace of a peer that was 20 rounds behind."""
    return Pace(seconds=seconds, num_replayed=replayed, num_committed=committed, num_behind=20 + committed - replayed)


def test_who_replays_faster_than_rounds_are_committed_arrives() -> None:
    closer = pace(10.0, replayed=15, committed=5)
    assert (closer.num_behind, closer.is_losing, closer.stands_still) == (10, False, False)
    assert closer.seconds_left == pytest.approx(10.0)


def test_who_replays_slower_never_arrives() -> None:
    losing = pace(10.0, replayed=2, committed=3)
    assert losing.is_losing
    assert losing.seconds_left is None


def test_who_is_as_fast_may_be_a_little_faster() -> None:
    """Rounds are whole: of rounds of 4.0 s and of 4.5 s, equally many end within 8 s."""
    equal = pace(8.0, replayed=2, committed=2)
    assert not equal.is_losing
    assert equal.stands_still
    assert equal.seconds_left is None


def test_of_a_moment_nothing_is_concluded() -> None:
    burst = pace(0.9 * LEAST_SECONDS, replayed=1, committed=3)
    assert not burst.is_losing
    assert not burst.stands_still
    assert burst.seconds_left is None
    assert not pace(10.0, replayed=0, committed=0).is_losing
