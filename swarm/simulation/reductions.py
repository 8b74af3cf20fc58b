"""How much of its time a machine computes while what it has learnt is reduced over a line of some bandwidth.

Streaming DiLoCo's question (arXiv 2501.18512, table 4), asked by studies/bandwidth.py; swarm/simulation/plans.py says
what each way to train sends and when. Pure; never sends anything.

A step computes forward, then backward. A piece may be sent once the backward of its layers is done; the line carries
the pieces one after the other in that order; and some later step's forward stops before the piece's layers until it
has arrived. Latency does not count, as the published table has none.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

FORWARD = 1 / 3
"""Share of a step's time that its forward takes; the backward, by activations and by weights, takes twice as much."""
NUM_WARM_PERIODS = 2
"""Periods that pass before one is measured, so that it begins with whatever its predecessor left on the line."""
BRACKET = 1e-6, 1e6
"""Gigabits a second between which a bandwidth is sought."""
PRECISION = 1e-4
"""Of a bandwidth that is sought."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is reduced as one."""

    step: int
    """Within the period, in whose backward it is made."""
    ready: float
    """Share of that step's time after which it can be sent: 1 is the end of the step."""
    due: float
    """Share of the time of the step that needs it before which it must have arrived: 0 is the beginning."""
    num_bytes: float
    """That one machine sends for it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is reduced in each period of a training that goes on for ever."""

    num_steps: int
    """Of a period."""
    delay_steps: int
    """Whole steps between the one that makes a piece and the one that needs it; 0: the next one needs it."""
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            assert 0 <= piece.step < self.num_steps, "a piece belongs to a step of the period"
            assert 0 <= piece.due <= FORWARD <= piece.ready <= 1, "made by a backward and needed by a forward"


def utilisation(plan: Plan, *, step_seconds: float, gigabits_per_second: float) -> float:
    """The share of its time that a machine computes."""
    seconds_per_byte = 8e-9 / gigabits_per_second
    made = defaultdict(list)
    for piece in sorted(plan.pieces, key=lambda piece: piece.ready):
        made[piece.step].append(piece)
    needed: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    now = line_free = began = 0.0
    for step in range((NUM_WARM_PERIODS + 1) * plan.num_steps):
        if step == NUM_WARM_PERIODS * plan.num_steps:
            began = now
        start = now
        for due, arrival in sorted(needed.pop(step, ())):
            # Whatever stops the forward puts off all that follows in this step.
            start = max(start, arrival - due * step_seconds)
        for piece in made[step % plan.num_steps]:
            line_free = max(line_free, start + piece.ready * step_seconds) + piece.num_bytes * seconds_per_byte
            needed[step + 1 + plan.delay_steps].append((piece.due, line_free))
        now = start + step_seconds
    return plan.num_steps * step_seconds / (now - began)


def needed_bandwidth(plan: Plan, *, step_seconds: float, wanted: float) -> float:
    """Gigabits a second with which a machine computes for a wanted share of its time, found by bisection."""
    low, high = BRACKET
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        if utilisation(plan, step_seconds=step_seconds, gigabits_per_second=middle) < wanted:
            low = middle
        else:
            high = middle
    return high
