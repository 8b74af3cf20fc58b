"""How busy a pipeline's peers are when its activations go from peer to peer, or by way of the trainer.

Used by studies/utilisation.py. Plays microbatches through machines, up-links and down-links on a Timeline. A machine
takes backwards before forwards and older microbatches before newer ones, as swarm/stage/task_queue.py does; a link
carries one tensor after the other. As many microbatches are kept in flight as it takes to keep the busiest of them
busy (the trainer's window finds that number). Token ids and losses are not counted, being small. Nothing fails here,
and nothing is drawn by chance.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from swarm.simulation.reductions import FORWARD
from swarm.simulation.timeline import Timeline

TRAINER = -1
"""The trainer's place in the pipeline."""
SLACK = 2.0
"""Microbatches in flight, over the fewest that could keep the busiest machine or link busy."""
WARM_ROUNDS, MEASURED_ROUNDS = 4, 20
"""How often each place in flight is used before machines are watched, and while they are, or nearly so."""


class Path(Enum):
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
class Visit:
    """One thing that happens to a microbatch."""

    place: tuple[str, int]
    """`machine`, `up` or `down`, and the stage it belongs to."""
    seconds: float
    away_seconds: float = 0.0
    """What passes after it before the next visit begins."""
    is_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen once the pipeline was full."""

    utilisation: float
    """Share of its time that a peer computes."""
    num_in_flight: int


def play(pipeline: Pipeline, path: Path) -> Outcome:
    """Let microbatches through, one after the other, until the pipeline has settled, and measure."""
    visits = list(journey(pipeline, path))
    num_in_flight = _enough(pipeline, visits)
    timeline = Timeline()
    numbers = itertools.count()
    stations: dict[tuple[str, int, int], Station] = {}

    def start() -> None:
        follow(next(numbers), 0)

    def follow(number: int, index: int) -> None:
        if index == len(visits):
            start()
            return
        visit = visits[index]
        kind, stage = visit.place
        # Equal peers take turns; there is one trainer.
        place = kind, stage, 0 if stage == TRAINER else number % pipeline.peers_per_stage
        station = stations.setdefault(place, Station(timeline))
        station.take(
            (not visit.is_backward, number, index),
            visit.seconds,
            lambda: timeline.after(visit.away_seconds, lambda: follow(number, index + 1)),
        )

    for _ in range(num_in_flight):
        start()
    machines = [
        stations.setdefault(("machine", stage, peer), Station(timeline))
        for stage in range(pipeline.num_stages)
        for peer in range(pipeline.peers_per_stage)
    ]
    round_seconds = SLACK * sum(visit.seconds + visit.away_seconds for visit in visits)
    timeline.run(WARM_ROUNDS * round_seconds)
    before = sum(machine.busy_seconds for machine in machines)
    timeline.run((WARM_ROUNDS + MEASURED_ROUNDS) * round_seconds)
    computed = sum(machine.busy_seconds for machine in machines) - before
    return Outcome(
        utilisation=computed / (MEASURED_ROUNDS * round_seconds * len(machines)), num_in_flight=num_in_flight
    )


def journey(pipeline: Pipeline, path: Path) -> Iterator[Visit]:
    """All that happens to one microbatch, in order."""
    last = pipeline.num_stages - 1
    for stage in range(pipeline.num_stages):
        above = TRAINER if path is Path.TRAINER or stage == 0 else stage - 1
        yield from _transfer(pipeline, above, stage, num_tensors=int(stage > 0))
        yield Visit(place=("machine", stage), seconds=pipeline.compute_seconds * FORWARD)
        if path is Path.TRAINER:
            yield from _transfer(pipeline, stage, TRAINER, num_tensors=int(stage < last))
    for stage in reversed(range(pipeline.num_stages)):
        if path is Path.TRAINER:
            yield from _transfer(pipeline, TRAINER, stage, num_tensors=int(stage > 0) + int(stage < last))
        yield Visit(place=("machine", stage), seconds=pipeline.compute_seconds * (1 - FORWARD), is_backward=True)
        above = TRAINER if path is Path.TRAINER or stage == 0 else stage - 1
        yield from _transfer(pipeline, stage, above, num_tensors=int(stage > 0))


def _transfer(pipeline: Pipeline, sender: int, receiver: int, *, num_tensors: int) -> Iterator[Visit]:
    num_bytes = num_tensors * pipeline.tensor_bytes
    for kind, place, away_seconds in (("up", sender, pipeline.round_trip_seconds / 2), ("down", receiver, 0.0)):
        rate = pipeline.trainer_bytes_per_second if place == TRAINER else pipeline.peer_bytes_per_second
        yield Visit(place=(kind, place), seconds=num_bytes / rate, away_seconds=away_seconds)


def _enough(pipeline: Pipeline, visits: list[Visit]) -> int:
    """Microbatches in flight, a multiple of the peers of a stage."""
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for visit in visits:
        sharers = 1 if visit.place[1] == TRAINER else pipeline.peers_per_stage
        busy[visit.place] += visit.seconds / sharers
    alone_seconds = sum(visit.seconds + visit.away_seconds for visit in visits)
    return pipeline.peers_per_stage * math.ceil(SLACK * alone_seconds / max(busy.values()) / pipeline.peers_per_stage)


class Station:
    """A machine or one direction of a link: does one thing at a time, the lowest priority first."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._waiting: list[tuple[tuple[bool, int, int], float, Callable[[], object]]] = []
        self._began: float | None = None
        self._done_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        """How long it has been at work until now."""
        return self._done_seconds + (0.0 if self._began is None else self._timeline.monotonic() - self._began)

    def take(self, priority: tuple[bool, int, int], seconds: float, done: Callable[[], object]) -> None:
        """Do something as soon as its turn comes, and say when it is done. Priorities differ."""
        heapq.heappush(self._waiting, (priority, seconds, done))
        self._next()

    def _next(self) -> None:
        if self._began is not None or not self._waiting:
            return
        _, seconds, done = heapq.heappop(self._waiting)
        self._began = self._timeline.monotonic()

        def finish() -> None:
            self._began = None
            self._done_seconds += seconds
            done()
            self._next()

        self._timeline.after(seconds, finish)
