"""Microbatches on their way through simulated peers."""

import random
from collections.abc import Callable, Collection

import pytest

from scripts.benches.simulate.microbatches.choosers import Answer, Ours
from scripts.benches.simulate.microbatches.hop import NOTICE_SECONDS, SimulatedTrainer, train
from scripts.benches.simulate.microbatches.machine import Machine
from scripts.benches.simulate.microbatches.pipeline import SimulatedPipeline, View
from scripts.benches.simulate.timeline import Timeline
from swarm.types import PeerId


def build(
    *stages: tuple[float, ...], link_seconds: float = 0.0, max_in_flight: int = 8,
    make_view: Callable[[Timeline, PeerId], View] | None = None,
) -> tuple[SimulatedPipeline, View]:  # fmt: skip
    """A pipeline, from the seconds that each peer takes for a microbatch, by stage; peer 2 of stage 1 is number 12."""
    timeline = Timeline()
    pipeline = SimulatedPipeline(
        timeline, random.Random(0), num_stages=len(stages), num_samples=4, max_in_flight=max_in_flight,
        make_view=make_view and (lambda machine: make_view(timeline, machine.peer_id)),
    )  # fmt: skip
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


class Noted(Ours):
    """Our router, which also records the failures that are reported to it."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline, random.Random(1))
        self.failures: list[bool] = []

    def failed(self, peer_id: PeerId, *, is_gone: bool) -> None:
        self.failures.append(is_gone)
        super().failed(peer_id, is_gone=is_gone)


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


def test_a_busy_peer_is_no_failure_and_is_asked_again() -> None:
    pipeline, view = build((1.0,), max_in_flight=1)
    num_busy: list[int] = []
    for _ in range(3):
        train(pipeline, view, num_busy.append)
    pipeline.timeline.run(30.0)
    assert len(num_busy) == 3
    assert sum(num_busy) > 0
    assert pipeline.num_reroutes == 0


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


def test_a_trainer_finds_the_swarm_s_capacity_and_shares_follow_speed() -> None:
    pipeline, view = build((0.2, 0.4, 0.6), link_seconds=0.01)
    trainer = SimulatedTrainer(pipeline, view)
    trainer.fill()
    pipeline.timeline.run(20.0)
    before = trainer.num_done
    pipeline.timeline.run(120.0)
    assert (trainer.num_done - before) / 100.0 == pytest.approx(1 / 0.2 + 1 / 0.4 + 1 / 0.6, rel=0.05)


def test_who_is_back_is_asked_as_soon_as_it_is_announced() -> None:
    pipeline, _ = build((1.0,))
    chooser = Noted(pipeline.timeline)
    view = View(chooser)
    pipeline.announce([view])
    machine = pipeline.peers[peer_id(0)].machine
    done: list[float] = []
    train(pipeline, view, lambda _: done.append(pipeline.timeline.monotonic()))
    pipeline.timeline.run(0.5)
    pipeline.kill(machine.peer_id)
    pipeline.timeline.run(3.0)
    pipeline.start(machine)
    pipeline.announce([view])
    pipeline.timeline.run(6.0)
    assert chooser.failures == [False], "its connection broke"
    assert done, "less than the 5 seconds of a ban have passed"


def test_where_nobody_listens_the_router_is_told_so() -> None:
    pipeline, _ = build((1.0,))
    chooser = Noted(pipeline.timeline)
    view = View(chooser)
    pipeline.announce([view])
    pipeline.kill(peer_id(0))
    train(pipeline, view, lambda _: None)
    pipeline.timeline.run(2.0)
    assert chooser.failures == [True]


def test_peers_tell_trainers_apart() -> None:
    """One trainer floods a busy peer, and the other one gets its turn all the same."""
    pipeline, _ = build((1.0,), max_in_flight=4)
    done: dict[str, int] = {"flood": 0, "quiet": 0}

    def send(view: View) -> None:
        train(pipeline, view, lambda _: came_back(view))

    def came_back(view: View) -> None:
        done[view.name] += 1
        send(view)

    for name, in_flight in (("flood", 40), ("quiet", 2)):
        view = View(Ours(pipeline.timeline, random.Random(1)), name)
        pipeline.announce([view])
        for _ in range(in_flight):
            send(view)
    pipeline.timeline.run(200.0)
    assert done["quiet"] > 0.3 * done["flood"]


def test_peers_that_hand_on_choose_by_what_they_have_seen_themselves() -> None:
    """Each of the two peers of stage 0 sends to a different peer of stage 1, whatever the trainer would choose."""

    class Fixed(Ours):
        def __init__(self, timeline: Timeline, choice: PeerId) -> None:
            super().__init__(timeline, random.Random(1))
            self.choice = choice
            self.stages: set[int] = set()
            self.num_answers = 0

        def choose(self, stage: int, num_samples: int, exclude: Collection[PeerId]) -> PeerId | None:
            self.stages.add(stage)
            return self.choice

        def succeeded(self, peer_id: PeerId, answer: Answer) -> None:
            assert peer_id == self.choice
            self.num_answers += 1

    choosers: dict[PeerId, Fixed] = {}

    def make_view(timeline: Timeline, who: PeerId) -> View:
        choosers[who] = Fixed(timeline, peer_id(10 + int(who, 16)))
        return View(choosers[who], who)

    pipeline, view = build((1.0, 1.0), (1.0, 1.0), make_view=make_view)
    trainer = Fixed(pipeline.timeline, peer_id(0))
    view.chooser = trainer
    for number, times in ((0, 2), (1, 3)):
        trainer.choice = peer_id(number)
        for _ in range(times):
            train(pipeline, view, lambda _: None)
            pipeline.timeline.run(pipeline.timeline.monotonic() + 10.0)
    assert trainer.stages == {0}
    assert {who: chooser.num_answers for who, chooser in choosers.items()} == {peer_id(0): 2, peer_id(1): 3}


def test_an_answer_of_a_full_peer_grants_nothing() -> None:
    """Free slots are counted before the answered microbatch's own is free, so the sender has to ask the next time."""
    pipeline, view = build((3.0,), link_seconds=0.2, max_in_flight=1)
    times: list[float] = []
    for until in (30.0, 60.0):
        train(pipeline, view, lambda _: times.append(pipeline.timeline.monotonic()))
        pipeline.timeline.run(until)
    assert times == [pytest.approx(3.0 + 4 * 0.1), pytest.approx(30.0 + 3.0 + 4 * 0.1)]


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
