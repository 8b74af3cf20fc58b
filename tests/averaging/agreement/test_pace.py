"""Whether a peer that is behind gets closer, and when it arrives."""

import pytest

from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.pace import PACE_FACTOR, PACE_ROUNDS, REMEMBERED_ROUNDS, Pace, RunPace
from tests.support.manual_clock import ManualClock


def pace(seconds: float, *, applied: int, committed: int) -> Pace:
    """The pace of a peer that was 20 rounds behind."""
    return Pace(seconds=seconds, num_applied=applied, num_committed=committed, num_behind=20 + committed - applied)


def test_who_applies_rounds_faster_than_rounds_are_committed_arrives() -> None:
    closer = pace(10.0, applied=15, committed=5)
    assert (closer.num_behind, closer.is_losing, closer.stands_still) == (10, False, False)
    assert closer.seconds_left == pytest.approx(10.0)


def test_who_applies_rounds_slower_never_arrives() -> None:
    losing = pace(10.0, applied=2, committed=3)
    assert losing.is_losing
    assert losing.seconds_left is None


# -- the run's pace ----------------------------------------------------------------------------------------------------


def at(round_number: int) -> Standing:
    """Where a peer is after some rounds of ten samples each."""
    return Standing(run_samples=10 * round_number, round=round_number, lineage=str(round_number))


def test_the_pace_is_that_of_the_fastest_round() -> None:
    clock = ManualClock()
    pace = RunPace(at(0), clock)
    assert pace.allows(at(1_000_000)), "nothing was measured"
    for number, seconds in ((1, 10.0), (2, 1.0), (3, 100.0)):
        clock.advance(seconds)
        pace.committed(at(number))
    assert pace.allows(at(3 + PACE_ROUNDS))
    assert not pace.allows(at(4 + PACE_ROUNDS))
    clock.advance(10.0)
    most = 3 + PACE_ROUNDS + int(PACE_FACTOR * 10.0)
    assert pace.allows(at(most))
    assert not pace.allows(at(most + 1))


def test_one_burst_is_not_remembered_for_ever() -> None:
    clock = ManualClock()
    pace = RunPace(at(0), clock)
    clock.advance(0.001)
    pace.committed(at(1))
    for number in range(2, REMEMBERED_ROUNDS + 2):
        clock.advance(10.0)
        pace.committed(at(number))
    clock.advance(10.0)
    most = REMEMBERED_ROUNDS + 1 + PACE_ROUNDS + int(PACE_FACTOR)
    assert pace.allows(at(most))
    assert not pace.allows(at(most + 1))
