"""Which share of its best throughput a pipeline keeps under each rule for moving, while hundreds of peers come and go.

The best throughput is that of peers which are evenly spread at every moment, at no cost.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from scripts.benches.shared.common import OutputOptions
from scripts.benches.simulate.fluid.churn import Visit, visits
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
