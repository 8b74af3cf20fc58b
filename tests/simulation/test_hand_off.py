"""Pipelines whose slowest part is known beforehand."""

import dataclasses

import pytest

from swarm.pipeline.window import MOST_IN_FLIGHT
from swarm.simulation.hand_off import Pipeline, Station, Way, journey, play
from swarm.simulation.timeline import Timeline
from swarm.stage.slots import LARGEST_NUM_SLOTS
from swarm.stage.task_queue import Priority

FAST = 1e12
BASE = Pipeline(
    num_stages=3, peers_per_stage=1, compute_seconds=0.5, tensor_bytes=100.0, round_trip_seconds=0.0,
    peer_bytes_per_second=100.0, trainer_bytes_per_second=100.0,
)  # fmt: skip


def with_lines(peer: float, trainer: float, **changes: float) -> Pipeline:
    return dataclasses.replace(BASE, peer_bytes_per_second=peer, trainer_bytes_per_second=trainer, **changes)  # type: ignore[arg-type]  # whole numbers among the changes are counts


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("round_trip_seconds", [0.0, 3.0])
def test_peers_compute_all_the_time_if_lines_cost_nothing(way: Way, round_trip_seconds: float) -> None:
    outcome = play(with_lines(FAST, FAST, round_trip_seconds=round_trip_seconds), way)
    assert outcome.utilisation == pytest.approx(1.0, abs=0.01)


def test_directly_the_line_of_an_inner_peer_is_the_limit() -> None:
    # It carries an activation to one side and a gradient to the other, a second each; half a second is computing.
    assert play(BASE, Way.DIRECT).utilisation == pytest.approx(0.5 / 2, abs=0.01)


def test_by_way_of_the_trainer_its_line_is_the_limit() -> None:
    # Up: of each of two boundaries the activation, the same once more with the backward, and the gradient.
    assert play(BASE, Way.TRAINER).utilisation == pytest.approx(0.5 / 6, abs=0.01)


def test_a_trainer_with_a_wide_line_leaves_the_limit_to_the_peers() -> None:
    # Down to an inner peer: its input, and with the backward its input once more and a gradient.
    assert play(with_lines(100.0, FAST), Way.TRAINER).utilisation == pytest.approx(0.5 / 3, abs=0.01)


def test_peers_of_a_stage_share_the_trainer_and_nothing_else() -> None:
    shared = dataclasses.replace(BASE, peers_per_stage=4)
    assert play(shared, Way.DIRECT).utilisation == pytest.approx(0.5 / 2, abs=0.01)
    assert play(shared, Way.TRAINER).utilisation == pytest.approx(0.5 / 24, abs=0.01)


@pytest.mark.parametrize(("peers_per_stage", "most"), [(1, LARGEST_NUM_SLOTS), (5, MOST_IN_FLIGHT)])
def test_our_peers_have_so_many_slots_and_our_trainer_so_many_in_flight(peers_per_stage: int, most: int) -> None:
    far = dataclasses.replace(with_lines(FAST, FAST, round_trip_seconds=60.0), peers_per_stage=peers_per_stage)
    ours = play(far, Way.DIRECT)
    assert ours.num_in_flight == most
    assert ours.utilisation < 0.5


def test_a_trainer_without_such_limits_keeps_its_peers_busy_at_any_distance() -> None:
    far = with_lines(FAST, FAST, round_trip_seconds=20.0)
    assert play(far, Way.TRAINER).utilisation > 0.5


def test_a_journey_counts_every_tensor() -> None:
    def sent(way: Way, kind: str) -> dict[int, float]:
        totals: dict[int, float] = {}
        for step in journey(BASE, way):
            if step.place[0] == kind:
                totals[step.place[1]] = totals.get(step.place[1], 0.0) + step.seconds
        return totals

    assert sent(Way.DIRECT, "up") == {-1: 0, 0: 1, 1: 2, 2: 1}
    assert sent(Way.DIRECT, "down") == {-1: 0, 0: 1, 1: 2, 2: 1}
    assert sent(Way.TRAINER, "up") == {-1: 6, 0: 1, 1: 2, 2: 1}
    assert sent(Way.TRAINER, "down") == {-1: 4, 0: 1, 1: 3, 2: 2}
    assert sent(Way.DIRECT, "machine") == pytest.approx({0: 0.5, 1: 0.5, 2: 0.5})


def test_a_station_takes_the_oldest_first_and_knows_how_long_it_worked() -> None:
    timeline = Timeline()
    station = Station(timeline)
    done: list[tuple[int, float]] = []
    for number in (2, 3, 1):
        station.take(Priority.FORWARD, number, 2.0, lambda number=number: done.append((number, timeline.monotonic())))  # type: ignore[misc]
    timeline.run(5.0)
    # The first one to come did not wait for better ones.
    assert done == [(2, 2.0), (1, 4.0)]
    assert station.busy_seconds == 5.0
    timeline.run(10.0)
    assert done[-1] == (3, 6.0)
    assert station.busy_seconds == 6.0
