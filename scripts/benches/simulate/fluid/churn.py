"""Synthetic traces of machines that come and go on a spot market, for the study `rebalancing`.

Single machines are taken away all the time and given back later. Waves of demand take many within minutes. Towards the
end fewer and fewer are to be had.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

STAY_SECONDS = 24 * 3600.0  # Mean time until a single machine is taken away
RETURN_SECONDS = 1.5 * 3600  # Mean time from then until it is given back
WAVE_GAP_SECONDS = 3600.0  # Mean time from one wave of demand to the next; there is none in the first hour
WAVE_SHARE = (0.1, 0.6)  # Bounds of the share of machines that a wave takes, which is drawn evenly
WAVE_SECONDS = 600.0  # The time within which a wave takes machines, and within which it gives them back
HOLD_SECONDS = 0.75 * 3600  # Mean time for which a wave keeps machines
SHORTAGE_SECONDS = 8 * 3600.0  # The length of the shortage at the end, in which fewer and fewer machines come back
SHORTAGE_SHARE = 0.9  # The share of the machines that are not available at the very end


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
