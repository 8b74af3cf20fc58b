"""Microbatches on their way through simulated peers."""

import random
from collections.abc import Collection
from functools import partial

import pytest

from scripts.benches.simulate.microbatches.choosers import Ours
from scripts.benches.simulate.microbatches.hop import NOTICE_SECONDS, train
from scripts.benches.simulate.microbatches.pipeline import Machine, SimulatedPipeline, View
from scripts.benches.simulate.timeline import Timeline
from swarm.types import PeerId


def build(*stages: tuple[float, ...], link_seconds: float = 0.0) -> tuple[SimulatedPipeline, View]:
    """A pipeline, from the seconds that each peer takes for a microbatch, by stage; peer 2 of stage 1 is number 12."""
    timeline = Timeline()
    pipeline = SimulatedPipeline(timeline, random.Random(0), num_stages=len(stages), num_samples=4, max_in_flight=8)
    for stage, peers in enumerate(stages):
        for number, seconds in enumerate(peers):
            machine = Machine(
                peer_id=peer_id(10 * stage + number), stage=stage, busy_seconds=seconds, link_seconds=link_seconds,
                jitter=0.0,
            )  # fmt: skip
            pipeline.start(machine)
    view = View(Ours(timeline, random.Random(1)))
    pipeline.announce([view])
    return pipeline, view


def peer_id(number: int) -> PeerId:
    return PeerId(f"{number:040x}")


def test_one_microbatch_takes_computing_and_links_there_and_back() -> None:
    pipeline, view = build((3.0,), (6.0,), link_seconds=0.2)
    times: list[float] = []
    train(pipeline, view, lambda _: times.append(pipeline.timeline.monotonic()))
    pipeline.timeline.run(30.0)
    # Question, answer, tensors and gradient take four times 0.1 s to stage 0, and four times 0.2 s between two peers.
    assert times == [pytest.approx(3.0 + 6.0 + 4 * 0.1 + 4 * 0.2)]
    train(pipeline, view, lambda _: times.append(pipeline.timeline.monotonic()))
    pipeline.timeline.run(60.0)
    assert times[1] - 30.0 == pytest.approx(9.0 + 2 * 0.1 + 2 * 0.2), "with credits nothing is asked"


def test_backward_goes_before_forward_and_older_before_newer() -> None:
    pipeline, _ = build((3.0,))
    timeline, simulated = pipeline.timeline, pipeline.peers[peer_id(0)]
    done: list[tuple[str, float]] = []

    def note(name: str, _: float) -> None:
        done.append((name, timeline.monotonic()))

    first = simulated.begin(partial(note, "first forward"))
    second = simulated.begin(partial(note, "second forward"))
    simulated.begin(partial(note, "third forward"))
    timeline.run(1.5)
    simulated.end(second, partial(note, "second backward"))
    simulated.end(first, partial(note, "first backward"))
    timeline.run(20.0)
    assert done == [
        ("first forward", 1.0), ("second forward", 2.0), ("first backward", 4.0), ("second backward", 6.0),
        ("third forward", 7.0),
    ]  # fmt: skip


def test_what_a_dead_peer_had_goes_to_another_one() -> None:
    pipeline, view = build((2.0,), (4.0, 4.0))
    done: list[float] = []
    train(pipeline, view, lambda _: done.append(pipeline.timeline.monotonic()))
    pipeline.timeline.run(1.5)
    (working,) = [peer for peer in pipeline.peers.values() if peer.machine.stage == 1 and peer.queue_length]
    pipeline.kill(working.peer_id)
    pipeline.timeline.run(30.0)
    assert pipeline.num_reroutes == 1
    # The sum of a forward of 2/3 s, 5/6 s that are lost, the time to notice the death, all of stage 1 again, and 4/3 s
    # backward.
    assert done == [pytest.approx(1.5 + NOTICE_SECONDS + 4.0 + 4 / 3)]


def test_nothing_is_lost_when_any_peer_dies_at_any_moment() -> None:
    pipeline, view = build((0.5, 0.7, 0.6), (0.5, 0.6, 0.8), (0.6, 0.5, 0.9), link_seconds=0.05)
    rng = random.Random(7)
    done: list[int] = []
    for _ in range(200):
        pipeline.timeline.at(rng.uniform(0, 60), lambda: train(pipeline, view, done.append))

    def restart(number: int) -> None:
        machine = pipeline.peers[peer_id(number)].machine
        pipeline.kill(machine.peer_id)
        pipeline.timeline.after(1.0, lambda: pipeline.start(machine))
        pipeline.timeline.after(2.0, lambda: pipeline.announce([view]))

    for at in range(2, 60, 4):
        pipeline.timeline.at(float(at), lambda: restart(10 * rng.randrange(3) + rng.randrange(3)))
    pipeline.timeline.run(400.0)
    assert len(done) == 200
    assert pipeline.num_reroutes > 5
    assert all(peer.queue_length == 0 and peer.grants() == 1 for peer in pipeline.peers.values()), "no slot is left"


def test_where_work_waits_it_is_left_to_others() -> None:
    """The peer that is chosen first has two tasks, and leaves the next microbatch to the second peer."""

    class InOrder(Ours):
        def choose(self, stage: int, num_samples: int, exclude: Collection[PeerId]) -> PeerId | None:
            return next(peer_id(number) for number in range(4) if peer_id(number) not in exclude)

    pipeline, view = build((3.0, 3.0, 3.0, 3.0))
    view.chooser = InOrder(pipeline.timeline, random.Random(1))
    pipeline.announce([view])
    peers = [pipeline.peers[peer_id(number)] for number in range(4)]
    for _ in range(2):
        peers[0].both(lambda seconds: None)
    num_busy: list[int] = []
    train(pipeline, view, num_busy.append)
    pipeline.timeline.run(1.0)
    assert [peer.queue_length for peer in peers] == [2, 1, 0, 0]
    pipeline.timeline.run(30.0)
    assert num_busy == [0]
