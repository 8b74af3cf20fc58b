"""How long computing waits for what is reduced, against cases that are worked out by hand."""

import pytest

from swarm.simulation.reductions import Piece, Plan, needed_bandwidth, utilisation

GIGABIT_BYTES = 125e6
"""What a line of one gigabit a second carries in a second."""


def plan(*pieces: Piece, num_steps: int = 1, delay_steps: int = 0) -> Plan:
    return Plan(num_steps=num_steps, delay_steps=delay_steps, pieces=pieces)


def piece(seconds: float, *, ready: float = 1.0, due: float = 0.0, step: int = 0) -> Piece:
    return Piece(step=step, ready=ready, due=due, num_bytes=seconds * GIGABIT_BYTES)


def test_nothing_to_reduce_is_computing_all_the_time() -> None:
    assert utilisation(plan(num_steps=5), step_seconds=1.0, gigabits_per_second=1.0) == 1.0


def test_a_piece_that_is_needed_at_once_stops_the_next_step() -> None:
    # Three seconds of computing, one of waiting.
    assert utilisation(plan(piece(1.0)), step_seconds=3.0, gigabits_per_second=1.0) == pytest.approx(3 / 4)


def test_only_what_the_line_has_left_over_when_the_backward_ends_is_waited_for() -> None:
    # Two layers: forward 1 s each, backward 2 s each. The second layer's piece may leave at 4 s, the first's at 6 s.
    both = (piece(3.0, ready=4 / 6, due=1 / 6), piece(3.0, ready=1.0, due=0.0))
    # They travel from 4 to 7 and from 7 to 10, where the next step begins.
    assert utilisation(plan(*both), step_seconds=6.0, gigabits_per_second=1.0) == pytest.approx(6 / 10)
    # Three times as fast: from 4 to 5 and from 6 to 7.
    assert utilisation(plan(*both), step_seconds=6.0, gigabits_per_second=3.0) == pytest.approx(6 / 7)


def test_a_forward_runs_on_until_the_layers_that_are_missing() -> None:
    # From 4 s to 7 s; the next step begins at 6 s and comes to this layer at 7 s.
    assert utilisation(
        plan(piece(3.0, ready=4 / 6, due=1 / 6)), step_seconds=6.0, gigabits_per_second=1.0
    ) == pytest.approx(1.0)
    # To 8 s: one second too late.
    assert utilisation(
        plan(piece(4.0, ready=4 / 6, due=1 / 6)), step_seconds=6.0, gigabits_per_second=1.0
    ) == pytest.approx(6 / 7)


def test_a_delay_hides_a_step_of_transfer_and_no_more_than_the_line_can_carry() -> None:
    once_in_four = plan(piece(5.0, step=3), num_steps=4, delay_steps=1)
    # Four seconds of it are hidden behind one step.
    assert utilisation(once_in_four, step_seconds=4.0, gigabits_per_second=1.0) == pytest.approx(16 / 17)
    assert utilisation(once_in_four, step_seconds=5.0, gigabits_per_second=1.0) == pytest.approx(1.0)
    # Every step makes five seconds of transfer: the line never rests, and sets the pace.
    every_step = plan(piece(5.0), delay_steps=1)
    assert utilisation(every_step, step_seconds=4.0, gigabits_per_second=1.0) == pytest.approx(4 / 5)


def test_the_needed_bandwidth_is_the_one_that_gives_the_utilisation() -> None:
    needed = needed_bandwidth(plan(piece(1.0)), step_seconds=3.0, wanted=0.75)
    assert needed == pytest.approx(1.0, rel=1e-3)
    needed = needed_bandwidth(plan(piece(1.0)), step_seconds=3.0, wanted=0.9)
    assert needed == pytest.approx(3.0, rel=1e-3)
