"""One simulated peer: it computes tasks in the order of a real peer's queue."""

import random
from functools import partial

import pytest

from scripts.benches.simulate.microbatches.machine import Machine, SimulatedPeer
from scripts.benches.simulate.timeline import Timeline
from swarm.errors import Overloaded
from swarm.types import PeerId

MACHINE = Machine(peer_id=PeerId("a" * 40), stage=0, busy_seconds=3.0, link_seconds=0.0, jitter=0.0)


def peer(timeline: Timeline, machine: Machine = MACHINE) -> SimulatedPeer:
    return SimulatedPeer(machine, timeline, random.Random(0), num_samples=4, max_in_flight=2)


def test_backward_goes_before_forward_and_older_before_newer() -> None:
    timeline = Timeline()
    done: list[tuple[str, float]] = []
    simulated = peer(timeline)

    def note(name: str, _: float) -> None:
        done.append((name, timeline.monotonic()))

    first = simulated.begin(partial(note, "first forward"))
    second = simulated.begin(partial(note, "second forward"))
    simulated.begin(partial(note, "third forward"))
    timeline.run(1.5)
    assert simulated.queue_length == 2
    simulated.end(second, partial(note, "second backward"))
    simulated.end(first, partial(note, "first backward"))
    timeline.run(20.0)
    assert done == [
        ("first forward", 1.0), ("second forward", 2.0), ("first backward", 4.0), ("second backward", 6.0),
        ("third forward", 7.0),
    ]  # fmt: skip


def test_who_has_just_finished_does_not_count_as_waiting() -> None:
    timeline = Timeline()
    simulated = peer(timeline)
    lengths: list[int] = []
    for _ in range(2):
        simulated.both(lambda seconds: lengths.append(simulated.queue_length))
    timeline.run(10.0)
    assert lengths == [1, 0]


def test_slots_are_limited_and_credits_say_so() -> None:
    simulated = peer(Timeline())
    assert simulated.grants() == 1
    simulated.admit("one")
    simulated.admit("one")
    assert simulated.grants() == 0
    with pytest.raises(Overloaded):
        simulated.admit("one")
    simulated.give_back("one")
    assert simulated.grants() == 1


def test_it_announces_what_it_measured() -> None:
    timeline = Timeline()
    simulated = peer(timeline)
    assert simulated.record().samples_per_second == 0.0
    simulated.measured(2.0)
    assert simulated.record().samples_per_second == pytest.approx(2.0)


def test_the_dead_finish_nothing() -> None:
    timeline = Timeline()
    simulated = peer(timeline)
    done: list[float] = []
    simulated.begin(done.append)
    simulated.die()
    timeline.run(10.0)
    assert not done
