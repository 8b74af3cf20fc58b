"""How busy a pipeline's peers are when its activations go from peer to peer, or by way of the trainer.

Used by studies/utilisation.py. Plays microbatches through machines, up-links and down-links on a Timeline. What comes
next at a machine, backwards before forwards and older microbatches before newer ones, is decided by the queue of a real
peer (swarm/stage/task_queue.py); a link carries one tensor after the other, older microbatches first. As many
microbatches are kept in flight as it takes to keep the busiest of them busy (the trainer's window finds that number),
but where peers hand on directly no more than a trainer and the slots of this project's peers allow. Token ids and
losses are not counted, being small. Nothing fails here, and nothing is drawn by chance.
"""

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from swarm.pipeline.window import MOST_IN_FLIGHT
from swarm.simulation.reductions import FORWARD
from swarm.simulation.timeline import Timeline
from swarm.stage.slots import LARGEST_NUM_SLOTS
from swarm.stage.task_queue import Priority, TaskQueue

TRAINER = -1
"""The trainer's place in the pipeline."""
SLACK = 2.0
"""Microbatches in flight, over the fewest that could keep the busiest machine or link busy."""
WARM_ROUNDS, MEASURED_ROUNDS = 4, 20
"""How often each place in flight is used before machines are watched, and while they are, or nearly so."""


class Way(Enum):
    """How a tensor gets from one stage to the next."""

    DIRECT = "direct"
    """From peer to peer, as ours do."""
    TRAINER = "trainer"
    """Back to the trainer, and from there to the next peer, as SWARM's and Petals' trainers do. A backward takes the
    stage's input along once more, as theirs does, for their peers have not kept it."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Equal stages, each of equal peers, fed by one trainer."""

    num_stages: int
    peers_per_stage: int
    compute_seconds: float
    """Forward and backward of one microbatch at one peer."""
    tensor_bytes: float
    """Of a microbatch's activations between two stages; its gradient is as long."""
    round_trip_seconds: float
    """Between any two machines."""
    peer_bytes_per_second: float
    """Of a peer's line, either way."""
    trainer_bytes_per_second: float
    """Of the trainer's line, either way."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that happens to a microbatch."""

    place: tuple[str, int]
    """`machine`, `up` or `down`, and the stage it belongs to."""
    seconds: float
    away_seconds: float = 0.0
    """What passes after it before the next step begins."""
    is_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen once the pipeline was full."""

    utilisation: float
    """Share of its time that a peer computes."""
    num_in_flight: int


def play(pipeline: Pipeline, way: Way) -> Outcome:
    """Let microbatches through, one after the other, until the pipeline has settled, and measure."""
    steps = list(journey(pipeline, way))
    num_in_flight = _enough(pipeline, steps)
    if way is Way.DIRECT:
        num_in_flight = min(num_in_flight, MOST_IN_FLIGHT, pipeline.peers_per_stage * LARGEST_NUM_SLOTS)
    timeline = Timeline()
    numbers = itertools.count()
    stations: dict[tuple[str, int, int], Station] = {}

    def start() -> None:
        follow(next(numbers), 0)

    def follow(number: int, index: int) -> None:
        if index == len(steps):
            start()
            return
        step = steps[index]
        kind, stage = step.place
        # Equal peers take turns; there is one trainer.
        place = kind, stage, 0 if stage == TRAINER else number % pipeline.peers_per_stage
        station = stations.setdefault(place, Station(timeline))
        station.take(
            Priority.BACKWARD if step.is_backward else Priority.FORWARD,
            number,
            step.seconds,
            lambda: timeline.after(step.away_seconds, lambda: follow(number, index + 1)),
        )

    for _ in range(num_in_flight):
        start()
    machines = [
        stations.setdefault(("machine", stage, peer), Station(timeline))
        for stage in range(pipeline.num_stages)
        for peer in range(pipeline.peers_per_stage)
    ]
    round_seconds = SLACK * sum(step.seconds + step.away_seconds for step in steps)
    timeline.run(WARM_ROUNDS * round_seconds)
    before = sum(machine.busy_seconds for machine in machines)
    timeline.run((WARM_ROUNDS + MEASURED_ROUNDS) * round_seconds)
    computed = sum(machine.busy_seconds for machine in machines) - before
    return Outcome(
        utilisation=computed / (MEASURED_ROUNDS * round_seconds * len(machines)), num_in_flight=num_in_flight
    )


def journey(pipeline: Pipeline, way: Way) -> Iterator[Step]:
    """All that happens to one microbatch, in order."""
    last = pipeline.num_stages - 1
    for stage in range(pipeline.num_stages):
        above = TRAINER if way is Way.TRAINER or stage == 0 else stage - 1
        yield from _transfer(pipeline, above, stage, num_tensors=int(stage > 0))
        yield Step(place=("machine", stage), seconds=pipeline.compute_seconds * FORWARD)
        if way is Way.TRAINER:
            yield from _transfer(pipeline, stage, TRAINER, num_tensors=int(stage < last))
    for stage in reversed(range(pipeline.num_stages)):
        if way is Way.TRAINER:
            yield from _transfer(pipeline, TRAINER, stage, num_tensors=int(stage > 0) + int(stage < last))
        yield Step(place=("machine", stage), seconds=pipeline.compute_seconds * (1 - FORWARD), is_backward=True)
        above = TRAINER if way is Way.TRAINER or stage == 0 else stage - 1
        yield from _transfer(pipeline, stage, above, num_tensors=int(stage > 0))


def _transfer(pipeline: Pipeline, sender: int, receiver: int, *, num_tensors: int) -> Iterator[Step]:
    num_bytes = num_tensors * pipeline.tensor_bytes
    for kind, place, away_seconds in (("up", sender, pipeline.round_trip_seconds / 2), ("down", receiver, 0.0)):
        rate = pipeline.trainer_bytes_per_second if place == TRAINER else pipeline.peer_bytes_per_second
        yield Step(place=(kind, place), seconds=num_bytes / rate, away_seconds=away_seconds)


def _enough(pipeline: Pipeline, steps: list[Step]) -> int:
    """Microbatches in flight, a multiple of the peers of a stage."""
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for step in steps:
        sharers = 1 if step.place[1] == TRAINER else pipeline.peers_per_stage
        busy[step.place] += step.seconds / sharers
    alone_seconds = sum(step.seconds + step.away_seconds for step in steps)
    return pipeline.peers_per_stage * math.ceil(SLACK * alone_seconds / max(busy.values()) / pipeline.peers_per_stage)


class Station:
    """A machine or one direction of a link: does one thing at a time."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._queue = TaskQueue(sys.maxsize)
        self._began: float | None = None
        self._done_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        """How long it has been at work until now."""
        return self._done_seconds + (0.0 if self._began is None else self._timeline.monotonic() - self._began)

    def take(self, priority: Priority, age: int, seconds: float, done: Callable[[], object]) -> None:
        """Do something as soon as its turn comes, and say when it is done."""
        self._queue.push(lambda: self._begin(seconds, done), priority=priority, age=age)
        self._next()

    def _next(self) -> None:
        if self._began is None and (task := self._queue.pop()) is not None:
            task.work()

    def _begin(self, seconds: float, done: Callable[[], object]) -> None:
        self._began = self._timeline.monotonic()

        def finish() -> None:
            self._began = None
            self._done_seconds += seconds
            done()
            self._next()

        self._timeline.after(seconds, finish)
