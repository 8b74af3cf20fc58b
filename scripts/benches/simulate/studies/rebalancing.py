"""Which share of its best throughput a pipeline keeps under each rule for moving, while hundreds of peers come and go.

The best throughput is that of peers which are evenly spread at every moment, at no cost. Peers come and go by synthetic
traces of a spot market: single machines are taken away all the time and given back later, waves of demand take many
within minutes, and towards the end fewer and fewer are to be had.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from scripts.benches.shared.common import OutputOptions
from scripts.benches.simulate.fluid.own_rule import NoRule, OwnRule, SwarmRule
from scripts.benches.simulate.fluid.swarm import FluidSwarm, Kept
from scripts.benches.simulate.timeline import Timeline
from swarm.rebalancing.layout import Paths
from swarm.types import Block

PAPER = {"none": 82.7, "swarm_300": 95.8, "swarm_60": 97.6}
"""The per cent of the optimum that the paper reports, for a trace of its own."""
DOWNLOAD_SECONDS = 60.0  # From giving up one stage to serving another one
FIT_POINTS = 1.0
"""By how many points our traces may differ from the paper's, without a rule and with its rule every 300 seconds."""

STAY_SECONDS = 24 * 3600.0  # Mean time until a single machine is taken away
RETURN_SECONDS = 1.5 * 3600  # Mean time from then until it is given back
WAVE_GAP_SECONDS = 3600.0  # Mean time from one wave of demand to the next; there is none in the first hour
WAVE_SHARE = (0.1, 0.6)  # Bounds of the share of machines that a wave takes, which is drawn evenly
WAVE_SECONDS = 600.0  # The time within which a wave takes machines, and within which it gives them back
HOLD_SECONDS = 0.75 * 3600  # Mean time for which a wave keeps machines
SHORTAGE_SECONDS = 8 * 3600.0  # The length of the shortage at the end, in which fewer and fewer machines come back
SHORTAGE_SHARE = 0.9  # The share of the machines that are not available at the very end


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """What each rule for moving between stages keeps of the best throughput."""

    seed: int = 0
    """The seed of all that is drawn."""
    num_traces: int = 10
    """Traces to take the mean over; the first is drawn with `seed`, the next with the number after it."""
    hours: float = 32.0
    """Length of a trace."""
    num_peers: int = 400
    """The number of peers at the start."""
    num_stages: int = 6
    """The number of the pipeline's stages."""
    variants: tuple[int, ...] = ()
    """How many variants each stage has, of which every combination is a path; left out, each has one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variants and (len(self.variants) != self.num_stages or min(self.variants) < 1):
            raise ValueError("--variants names a number of at least 1 for each of the stages")
        if self.num_stages < 2 or self.num_peers < len(self.shares):
            raise ValueError("there must be at least 2 stages, and a peer for each of their variants")
        if self.hours <= 2:
            raise ValueError("a trace must be longer than 2 hours")

    @property
    def paths(self) -> Paths:
        each = map(range, self.variants or (1,) * self.num_stages)
        return {tuple(map(Block, itertools.count(), path)): 1.0 for path in itertools.product(*each)}

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the samples that pass each block."""
        return tuple(1 / number for number in self.variants or (1,) * self.num_stages for _ in range(number))


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One stay of a machine in the run; a machine that comes back counts as another peer."""

    arrives: float  # When the machine comes, in seconds since the start of the trace; 0 if it is there from the start
    leaves: float  # When the machine leaves; infinite if it is there at the end


@dataclass(frozen=True, kw_only=True)
class _Wave:
    begins: float
    ends: float
    share: float


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    whole: Kept
    last_hour: Kept
    num_moves: int


def run(options: Options) -> dict[str, Any]:
    seeds = range(options.seed, options.seed + options.num_traces)
    traces = {seed: visits(options.num_peers, options.hours * 3600, random.Random(seed)) for seed in seeds}
    outcomes = {
        name: [_one(options, make, trace, seed) for seed, trace in traces.items()] for name, make in RULES.items()
    }

    def means(figure: Callable[[_Outcome], float]) -> dict[str, float]:
        return {name: statistics.fmean(map(figure, rows)) for name, rows in outcomes.items()}

    percent = means(lambda one: one.whole.percent)
    percent_of_present = means(lambda one: one.whole.percent_of_present)
    return {
        "percent_of_optimal": percent, "percent_of_present": percent_of_present,
        "lowest_trace": {name: min(one.whole.percent for one in rows) for name, rows in outcomes.items()},
        "last_hour": means(lambda one: one.last_hour.percent),
        "num_moves": means(lambda one: one.num_moves), "closed_of_what_swarm_60_leaves": _closed(percent),
        "closed_of_present": _closed(percent_of_present),
        "paper": PAPER,
    }  # fmt: skip


def exit_code(figures: dict[str, Any]) -> int:
    """1 if the traces differ too much from the paper's, or if our rule closes less than half of the gap at T = 60."""
    percent = figures["percent_of_optimal"]
    fits = all(abs(percent[rule] - PAPER[rule]) <= FIT_POINTS for rule in ("none", "swarm_300"))
    return int(not (fits and figures["closed_of_what_swarm_60_leaves"] >= 0.5))


def _closed(percent: dict[str, float]) -> float:
    """The share of the gap between the paper's rule (T = 60 seconds) and the optimum that our rule closes."""
    left = 100.0 - percent["swarm_60"]
    return (percent["ours"] - percent["swarm_60"]) / left if left else 0.0


RULES: dict[str, Callable[[FluidSwarm, random.Random], NoRule]] = {
    "none": NoRule, "swarm_300": partial(SwarmRule, period_seconds=300.0),
    "swarm_60": partial(SwarmRule, period_seconds=60.0), "ours": OwnRule,
}  # fmt: skip


@cache
def _best(shares: Sequence[float], num_peers: int) -> float:
    """The throughput of so many peers that are spread over blocks with these shares in the best way."""
    spread = [(1.0 / share, share) for share in shares]
    if num_peers < len(spread):
        return 0.0
    heapq.heapify(spread)
    for _ in range(num_peers - len(spread)):
        rate, share = spread[0]
        heapq.heapreplace(spread, (rate + 1 / share, share))
    return spread[0][0]


def _one(
    options: Options, make: Callable[[FluidSwarm, random.Random], NoRule], trace: list[Visit], seed: int
) -> _Outcome:
    timeline = Timeline()
    shares = options.shares
    swarm = FluidSwarm(
        timeline, len(shares), DOWNLOAD_SECONDS, lambda peers: _best(shares, len(peers)), paths=options.paths
    )
    rule = make(swarm, random.Random(seed))

    def come(peer: int) -> None:
        swarm.come(peer)
        rule.came(peer)

    def leave(peer: int) -> None:
        swarm.leave(peer)
        rule.left(peer)

    for peer, visit in enumerate(trace):
        if visit.arrives == 0.0:
            # Peers that are there at the start come first in a trace, and are spread evenly over the stages.
            swarm.start(peer, swarm.loads.index(min(swarm.loads)))
            rule.began(peer)
        else:
            timeline.at(visit.arrives, partial(come, peer))
        timeline.at(visit.leaves, partial(leave, peer))
    end = options.hours * 3600
    timeline.run(end - 3600.0)
    before = swarm.kept()
    timeline.run(end)
    whole = swarm.kept()
    return _Outcome(whole=whole, last_hour=whole.since(before), num_moves=swarm.num_moves)


def visits(num_machines: int, end: float, rng: random.Random) -> list[Visit]:
    """A trace of so many machines, which are all there at the start, until `end` in seconds."""
    waves = list(_waves(end, rng))
    found = [visit for _ in range(num_machines) for visit in _machine(end, waves, rng)]
    return sorted(found, key=lambda visit: visit.arrives)


def _waves(end: float, rng: random.Random) -> Iterator[_Wave]:
    at = 3600.0
    while (at := at + rng.expovariate(1 / WAVE_GAP_SECONDS)) < end:
        ends = at + rng.expovariate(1 / HOLD_SECONDS)
        yield _Wave(begins=at, ends=ends, share=rng.uniform(*WAVE_SHARE))


def _machine(end: float, waves: list[_Wave], rng: random.Random) -> Iterator[Visit]:
    # At `gone` the machine is taken away, if it is there, and it is never given back.
    gone = end
    if rng.random() < SHORTAGE_SHARE:
        gone -= rng.random() * min(SHORTAGE_SECONDS, end)
    takers = [wave for wave in waves if rng.random() < wave.share]
    taken = []
    for wave in takers:
        begins = wave.begins + rng.random() * WAVE_SECONDS
        taken.append((begins, max(begins, wave.ends) + rng.random() * WAVE_SECONDS))
    at = 0.0
    while at < gone:
        alone = at + rng.expovariate(1 / STAY_SECONDS)
        ends = [(alone, alone + rng.expovariate(1 / RETURN_SECONDS))]
        ends += [(begins, back) for begins, back in taken if begins > at]
        leaves, back = min(ends)
        yield Visit(arrives=at, leaves=min(leaves, gone) if min(leaves, gone) < end else float("inf"))
        # Another wave may hold the machine when it would come back.
        at = max([back, *(until for begins, until in taken if begins < back < until)])
