"""How far the run can have gone on while a peer was away."""

from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.pace import PACE_FACTOR, PACE_ROUNDS, REMEMBERED_ROUNDS, RunPace
from tests.support.manual_clock import ManualClock


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
