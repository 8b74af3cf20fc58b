"""Throughput and tail latency of ways to choose a peer, from ten peers to ten thousand, while peers fail.

SWARM's trainers choose the peers of all stages; with the other ways each machine that hands a microbatch on chooses the
next peer. Failures come at the rates of the CheckFree paper (arXiv 2506.15461).
"""

import gc
import hashlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from scripts.benches.shared.common import OutputOptions
from scripts.benches.simulate.microbatches.choosers import ByChance, Chooser, Ours, SwarmQueue
from scripts.benches.simulate.microbatches.hop import train
from scripts.benches.simulate.microbatches.pipeline import Machine, SimulatedPipeline, View
from scripts.benches.simulate.timeline import Timeline
from swarm.machine.clock import Clock
from swarm.types import PeerId

CHOOSERS: dict[str, Callable[[Clock, random.Random], Chooser]] = {
    "swarm": SwarmQueue, "swarm_by_peers": SwarmQueue, "ours": Ours, "random": ByChance,
}  # fmt: skip
CHOSEN_BY_TRAINERS = {"swarm"}
"""The ways by which trainers choose the peers of all stages. With the others, SWARM's queue by peers among them, each
peer chooses the next one."""
SAMPLING = {"ours"}
"""The ways by which a sender knows a sample of a large stage. With the others it knows all peers."""
VIEWS_PER_STAGE = 250
"""If a stage has more peers than this, several of them share one view, since memory has no room for more views."""
USUAL_SECONDS = 1.0  # How long a typical peer computes for a microbatch
SPREAD = 0.5
"""Standard deviation of the logarithm of a peer's computing time: one in six is 1.6 times slower than usual or more,
and one in six as much faster."""
LINK_SECONDS = (0.02, 0.2)  # Bounds of the round-trip time to a peer, which is drawn evenly
ITERATION_SECONDS = 10.0  # The length of an iteration, in which a failure is as likely as the rate says
DOWN_SECONDS = 20.0  # Mean time for which a machine that died is away
DIRECTORY_SECONDS = 5.0  # How often the senders read the directory
ONE_SEED_FROM = 10_000
"""With this many peers or more there is only one run: it is an average in itself, and takes more than a minute."""
WARM_UP_SECONDS = 60.0
"""How long figures are left out at the start, when senders do not know peers' speeds yet, and give slow peers too
much."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Throughput and latency of ways to choose a peer, under failures."""

    num_peers: tuple[int, ...] = (10, 100, 1000, 10000)
    """The sizes of the swarms, in peers."""
    failure_percent: tuple[float, ...] = (0.2, 0.4, 1.0)
    """Per cent of the peers that die in an iteration."""
    num_stages: int = 4
    """The number of the pipeline's stages, at most half as many as there are peers."""
    num_trainers: int = 8
    """The number of trainers, each with a view of its own of the swarm."""
    num_seeds: int = 3
    """Runs of each setting to take the mean over, drawn with the seeds 0, 1, ...; from 10,000 peers on there is only
    one."""
    num_visits: int = 60000
    """About how many microbatches times stages are simulated in each run, of at least 30 and at most 1200 seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_peers) < 2 or max(self.failure_percent) > 100:
            raise ValueError("there must be at least 2 peers, and --failure-percent takes numbers up to 100")


def run(options: Options) -> dict[str, Any]:
    # A run's garbage has no cycles, and the collector's searches for some would take a third of the time.
    gc.disable()
    try:
        return {
            "settings": [
                {
                    "num_peers": size,
                    "failure_percent": rate,
                    "num_seeds": len(seeds := _seeds(options, size)),
                    **{
                        name: mean_and_spread([_one(options, size, rate, name, seed) for seed in seeds])
                        for name in CHOOSERS
                    },
                }
                for size in options.num_peers
                for rate in options.failure_percent
            ]
        }
    finally:
        gc.enable()


def _seeds(options: Options, size: int) -> range:
    return range(1 if size >= ONE_SEED_FROM else options.num_seeds)


def mean_and_spread(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The mean of every figure over the runs; `spread` holds each figure's highest value minus its lowest."""
    return {
        **{figure: statistics.fmean(run[figure] for run in runs) for figure in runs[0]},
        "spread": {figure: max(run[figure] for run in runs) - min(run[figure] for run in runs) for figure in runs[0]},
    }


@dataclass(eq=False)
class _Load:
    """Trainers that keep a fixed number of microbatches in flight, and how long these took."""

    pipeline: SimulatedPipeline
    latencies: list[float] = field(default_factory=list)

    def send(self, view: View) -> None:
        train(self.pipeline, view, partial(self._came_back, view, self.pipeline.timeline.monotonic()))

    def _came_back(self, view: View, sent_at: float) -> None:
        now = self.pipeline.timeline.monotonic()
        if now >= WARM_UP_SECONDS:
            self.latencies.append(now - sent_at)
        self.send(view)


def _one(options: Options, size: int, failure_percent: float, name: str, seed: int) -> dict[str, float]:
    gc.collect()  # what the last run left
    timeline = Timeline()
    world, chance = random.Random(seed), random.Random(f"{seed} peers")
    num_stages = min(options.num_stages, size // 2)

    def make_view(who: str) -> View:
        return View(CHOOSERS[name](timeline, random.Random(f"{seed} {who}")), who, knows_all=name not in SAMPLING)

    hands_on = None if name in CHOSEN_BY_TRAINERS else _view_maker(make_view, size // num_stages)
    pipeline = SimulatedPipeline(timeline, chance, num_stages=num_stages, make_view=hands_on)
    machines = [_machine(world, number, number % num_stages) for number in range(size)]
    for machine in machines:
        pipeline.start(machine)
    views = [make_view(f"trainer {number}") for number in range(options.num_trainers)]
    for view in views:
        view.under_way = 2 * size // len(views)
    seconds = min(1200.0, max(30.0, options.num_visits * USUAL_SECONDS / size))
    end = WARM_UP_SECONDS + seconds
    for machine in machines:
        _let_fail(pipeline, machine, failure_percent / 100 / ITERATION_SECONDS, end, random.Random(world.random()))
    capacity = Capacity(pipeline, end)

    def read_directory() -> None:
        pipeline.announce(views)
        timeline.after(DIRECTORY_SECONDS, read_directory)

    read_directory()
    load = _Load(pipeline)
    # Two microbatches for each peer keep all peers busy, with a few waiting: each microbatch keeps one busy.
    for number in range(2 * size):
        timeline.after(world.random() * 2 * num_stages * USUAL_SECONDS, partial(load.send, views[number % len(views)]))
    timeline.run(WARM_UP_SECONDS)
    num_reroutes = pipeline.num_reroutes
    timeline.run(end)
    if len(load.latencies) < 2 or not capacity.microbatches:
        raise ValueError(f"{size} peers have done next to nothing in {seconds:.0f} s: --failure-percent is too high")
    quantiles = statistics.quantiles(load.latencies, n=100)
    return {
        "percent_of_capacity": 100.0 * len(load.latencies) / capacity.microbatches, "p50_seconds": quantiles[49],
        "p99_seconds": quantiles[98], "num_reroutes": pipeline.num_reroutes - num_reroutes,
    }  # fmt: skip


def _view_maker(make_view: Callable[[str], View], peers_per_stage: int) -> Callable[[Machine], View]:
    """A function that makes a view for a peer that starts: a new one, or, if there are too many peers, a shared one."""
    if peers_per_stage <= VIEWS_PER_STAGE:
        return lambda machine: make_view(machine.peer_id)
    shared: dict[tuple[int, int], View] = {}

    def find(machine: Machine) -> View:
        which = machine.stage, int(machine.peer_id, 16) % VIEWS_PER_STAGE
        if which not in shared:
            shared[which] = make_view(f"peers {which}")
        return shared[which]

    return find


def _machine(rng: random.Random, number: int, stage: int) -> Machine:
    peer_id = PeerId(hashlib.sha1(b"%d" % number).hexdigest())
    return Machine(
        peer_id=peer_id, stage=stage, busy_seconds=USUAL_SECONDS * rng.lognormvariate(0.0, SPREAD),
        link_seconds=rng.uniform(*LINK_SECONDS),
    )  # fmt: skip


def _let_fail(
    pipeline: SimulatedPipeline, machine: Machine, per_second: float, until: float, rng: random.Random
) -> None:
    at = 0.0
    while per_second and (at := at + rng.expovariate(per_second)) < until:
        pipeline.timeline.at(at, partial(pipeline.kill, machine.peer_id))
        at += rng.expovariate(1 / DOWN_SECONDS)
        pipeline.timeline.at(at, partial(pipeline.start, machine))


class Capacity:
    """How much the pipeline could compute. At every moment its weakest stage is the limit, which is read once a
    second."""

    def __init__(self, pipeline: SimulatedPipeline, until: float) -> None:
        self._pipeline = pipeline
        self._until = until
        self.microbatches = 0.0
        pipeline.timeline.at(WARM_UP_SECONDS, self._read)

    def _read(self) -> None:
        left = self._until - self._pipeline.timeline.monotonic()
        if left <= 0:
            return
        rates = [0.0] * self._pipeline.num_stages
        for peer in self._pipeline.peers.values():
            rates[peer.machine.stage] += 1.0 / peer.machine.busy_seconds
        self.microbatches += min(rates) * min(1.0, left)
        self._pipeline.timeline.after(1.0, self._read)
