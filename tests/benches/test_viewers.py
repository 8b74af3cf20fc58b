"""What viewers cost: how turns are compared."""

import pytest

from scripts.benches.viewers import Turn, compared


def _turn(steps: float, peers: float, page: float) -> Turn:
    return Turn(steps_per_second=steps, peers_cpu=peers, dashboard_cpu=page, viewers_cpu=0.5, messages_per_second=25.0)


def test_each_turn_is_compared_with_its_neighbour() -> None:
    """This holds also where the machine has become slower meanwhile."""
    watched = [_turn(9.0, 1.8, 0.2), _turn(4.5, 0.9, 0.2), _turn(2.25, 0.45, 0.3)]
    unwatched = [_turn(10.0, 1.0, 0.1), _turn(5.0, 0.5, 0.1), _turn(2.5, 0.25, 0.1)]
    found = compared(watched, unwatched)
    assert found["throughput"] == pytest.approx(0.9)
    assert found["peers_cpu_per_step"] == pytest.approx(2.0)
    assert found["with"]["dashboard_cpu"] == 0.2
    assert found["without"]["steps_per_second"] == 5.0
