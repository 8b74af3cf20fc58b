"""Synthetic traces of machines that come and go on a spot market, for the study `rebalancing`.

Single machines are taken away all the time and given back later. Waves of demand take many within minutes. Towards the
end fewer and fewer are to be had.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One stay of a machine in the run; a machine that comes back counts as another peer."""

    arrives: float  # When the machine comes, in seconds since the start of the trace; 0 if it is there from the start
    leaves: float  # When the machine leaves; infinite if it is there at the end


@dataclass(frozen=True, kw_only=True)
class Market:
    """How machines are given and taken away."""

    num_machines: int = 400  # The number of machines at the start; there are never more
    hours: float = 32.0
    stay_hours: float = 24.0  # Mean time until a single machine is taken away
    return_hours: float = 1.5  # Mean time until a single machine that was taken away is given back
    wave_hours: float = 1.0  # Mean time from one wave of demand to the next; there is none in the first hour
    wave_share: tuple[float, float] = (0.1, 0.6)
    """Bounds of the share of machines that a wave takes, which is drawn evenly."""
    wave_minutes: float = 10.0  # The time within which a wave takes machines, and within which it gives them back
    hold_hours: float = 0.75  # Mean time for which a wave keeps machines
    shortage_hours: float = 8.0  # The length of the shortage at the end, in which fewer and fewer machines come back
    shortage_share: float = 0.9  # The share of the machines that are not available at the very end


@dataclass(frozen=True, kw_only=True)
class _Wave:
    begins: float
    ends: float
    share: float


def visits(market: Market, rng: random.Random) -> list[Visit]:
    waves = list(_waves(market, rng))
    found = [visit for _ in range(market.num_machines) for visit in _machine(market, waves, rng)]
    return sorted(found, key=lambda visit: visit.arrives)


def _waves(market: Market, rng: random.Random) -> Iterator[_Wave]:
    at = 3600.0
    while (at := at + rng.expovariate(1 / (market.wave_hours * 3600))) < market.hours * 3600:
        ends = at + rng.expovariate(1 / (market.hold_hours * 3600))
        yield _Wave(begins=at, ends=ends, share=rng.uniform(*market.wave_share))


def _machine(market: Market, waves: list[_Wave], rng: random.Random) -> Iterator[Visit]:
    end = market.hours * 3600
    # At `gone` the machine is taken away, if it is there, and it is never given back.
    gone = end
    if rng.random() < market.shortage_share:
        gone -= rng.random() * min(market.shortage_hours * 3600, end)
    spread = market.wave_minutes * 60
    takers = [wave for wave in waves if rng.random() < wave.share]
    taken = []
    for wave in takers:
        begins = wave.begins + rng.random() * spread
        taken.append((begins, max(begins, wave.ends) + rng.random() * spread))
    at = 0.0
    while at < gone:
        alone = at + rng.expovariate(1 / (market.stay_hours * 3600))
        ends = [(alone, alone + rng.expovariate(1 / (market.return_hours * 3600)))]
        ends += [(begins, back) for begins, back in taken if begins > at]
        leaves, back = min(ends)
        yield Visit(arrives=at, leaves=min(leaves, gone) if min(leaves, gone) < end else float("inf"))
        # Another wave may hold the machine when it would come back.
        at = max([back, *(until for begins, until in taken if begins < back < until)])
