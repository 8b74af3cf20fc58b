"""Do peers of different capacity that choose their stages use all that they have, and how soon after a change?

Peers come one after another, with capacities of 1 : 4 : 16. Then another one comes, or one is killed. A stage that no
peer holds any more is restored from a checkpoint.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from scripts.benches.shared.common import OutputOptions
from scripts.benches.simulate.fluid.own_rule import LOOK_SECONDS, OwnRule
from scripts.benches.simulate.fluid.swarm import FluidSwarm
from scripts.benches.simulate.timeline import Timeline
from swarm.rebalancing.layout import Span, all_spans
from swarm.types import Block

CAPACITIES = (1.0, 4.0, 16.0)
DOWNLOAD_SECONDS = 20.0  # From giving up a stage to serving another one
BETWEEN_SECONDS = 60.0  # From one newcomer to the next
SETTLED_SECONDS = 1200.0  # By then all moves that newcomers bring about are made
WATCHED_SECONDS = 600.0
BACK = 0.9
"""The share of what the present peers can do at best at which the swarm counts as recovered."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """How well peers of capacities 1 : 4 : 16 are used that choose their stages themselves."""

    num_seeds: int = 10
    """Swarms to take the mean over, which differ in who comes first and in all that is drawn."""
    num_stages: int = 4
    """The number of the pipeline's stages."""
    num_peers: int = 3
    """Peers before the change; their capacities are 1, 4, 16, 1, and so on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (2 <= self.num_stages <= 6 and 2 <= self.num_peers <= 4):
            raise ValueError("there must be 2 to 6 stages, and 2 to 4 peers: all of their layouts are compared")


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    share: float  # The throughput before the change, over the best of all layouts
    seconds: float  # From the change until the swarm is back; WATCHED_SECONDS if it is not
    after: float  # The throughput at the end, over the best of all layouts
    blocks_moved: int  # How many blocks peers entered after the change, the newcomer's own ones left out


def run(options: Options) -> dict[str, Any]:
    """Figures by the room of each peer: for all stages, for half of them, and for half of them with lines that carry
    half of what the peer computes at one stage."""
    half = -(-options.num_stages // 2)
    return {
        "room_for_all": _row(options, options.num_stages, math.inf),
        "room_for_half": _row(options, half, math.inf),
        "thin_lines": _row(options, half, 0.5),
        "period_seconds": LOOK_SECONDS,
    }


def exit_code(figures: dict[str, Any]) -> int:
    """1 if peers with room for all stages are used to less than 95 %, or are not back within two check periods."""
    row = figures["room_for_all"]
    return int(row["share_of_capacity"] < 0.95 or row["most_periods"] > 2.0)


def _row(options: Options, room: int, line: float) -> dict[str, Any]:
    changes: dict[str, Callable[[_World], None]] = {"join": _World.join}
    changes |= {f"kill_{number}": partial(_World.kill, number=number) for number in range(options.num_peers)}
    outcomes = {
        name: [_World(options, room, line, seed).after(change) for seed in range(options.num_seeds)]
        for name, change in changes.items()
    }
    every = list(itertools.chain.from_iterable(outcomes.values()))
    recovered = [one for one in every if one.seconds < WATCHED_SECONDS]
    return {
        "share_of_capacity": statistics.fmean(one.share for one in every),
        "lowest_share": min(one.share for one in every),
        "share_after_change": statistics.fmean(one.after for one in every),
        "recovered": len(recovered) / len(every),
        "mean_periods": statistics.fmean(one.seconds for one in recovered) / LOOK_SECONDS if recovered else None,
        "most_periods": max((one.seconds for one in every), default=0.0) / LOOK_SECONDS,
        "blocks_moved": {name: statistics.fmean(one.blocks_moved for one in rows) for name, rows in outcomes.items()},
    }


class _World:
    """One swarm, from its first peer on. `line` is what a peer's line carries, as a multiple of its capacity."""

    def __init__(self, options: Options, room: int, line: float, seed: int) -> None:
        rng = random.Random(seed)
        self._timeline = Timeline()
        self._room = room
        self._swarm = FluidSwarm(
            self._timeline, options.num_stages, DOWNLOAD_SECONDS, self._best, line=line,
            capacity={number: CAPACITIES[number % 3] for number in range(options.num_peers)},
        )  # fmt: skip
        self._rule = OwnRule(self._swarm, rng, room=room)
        for place, peer in enumerate(rng.sample(range(options.num_peers), options.num_peers)):
            self._timeline.at(BETWEEN_SECONDS * place, partial(self._come, peer))
        self._timeline.run(SETTLED_SECONDS)

    def join(self) -> None:
        peer = len(self._swarm.capacity)
        self._swarm.capacity[peer] = CAPACITIES[1]
        self._come(peer)

    def kill(self, number: int) -> None:
        self._swarm.leave(number)
        self._rule.left(number)

    def after(self, change: Callable[["_World"], None]) -> _Outcome:
        swarm = self._swarm
        share, entered, began_at = self._share(), swarm.num_entered, self._timeline.monotonic()
        change(self)
        seconds = float("inf")
        while self._timeline.monotonic() < began_at + WATCHED_SECONDS:
            if seconds == float("inf") and self._share() >= BACK:
                seconds = self._timeline.monotonic() - began_at
            self._timeline.run(self._timeline.monotonic() + 1.0)
        return _Outcome(
            share=share, seconds=min(seconds, WATCHED_SECONDS), after=self._share(),
            blocks_moved=swarm.num_entered - entered,
        )  # fmt: skip

    def _come(self, peer: int) -> None:
        self._swarm.come(peer)
        self._rule.came(peer)

    def _best(self, peers: Collection[int]) -> float:
        swarm = self._swarm
        capacities = tuple(sorted(swarm.capacity[peer] for peer in peers))
        return best_throughput((1.0,) * swarm.num_stages, self._room, capacities, line=swarm.line)

    def _share(self) -> float:
        best = self._best(self._swarm.present)
        return min(self._swarm.throughput) / best if best else 1.0


@cache
def best_throughput(costs: Sequence[float], room: int, capacities: Sequence[float], *, line: float = math.inf) -> float:
    """The throughput of the best of all layouts of peers with these capacities; see `throughput`."""
    each = layouts(len(costs), room, len(capacities))
    return max(throughput(costs, capacities, chosen, line=line) for chosen in each)


def layouts(num_stages: int, room: int, num_peers: int) -> Iterable[tuple[Span, ...]]:
    """All ways in which peers that have room for so many stages can choose their spans."""
    return itertools.product(all_spans([tuple(map(Block, range(num_stages)))], room), repeat=num_peers)


def throughput(
    costs: Sequence[float], capacities: Iterable[float], layout: Iterable[Span], *, line: float = math.inf
) -> float:
    """That of the weakest stage, in samples per second. `costs` are the stages' relative costs, and a capacity is what
    a peer manages at a stage of cost 1. Its line carries `line` times that."""
    rates = [0.0] * len(costs)
    for capacity, span in zip(capacities, layout, strict=True):
        computed = 1 / sum(costs[block.stage] for block in span)
        for block in span:
            rates[block.stage] += capacity * min(computed, math.inf if len(span) == len(costs) else line)
    return min(rates)
