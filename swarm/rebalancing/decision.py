"""Should this peer stay, or move to another stage? And where should a newcomer go?

Asked by the stage peer's program now and then, and by simulations with every peer. Pure: the same layout gives the
same answer. Knows neither the DHT nor what moving takes; a peer that is on the way counts as arrived.

A pipeline is as fast as its weakest stage. Every peer plans for all: again and again the move that brings most to the
weakest stage, until none brings anything. It moves if the plan, up to where it pays best, contains a move of its own.
Of several peers with about the same gain each sees itself in the plan. So the first one to look goes, without waiting
for a particular peer's turn, and the others see its claim.

Compared with SWARM's rule (one peer, from the stage with the shortest queues to the one with the longest, every T
seconds) a move has to bring something, several gaps are filled at once, and a stage is never emptied. Compared with
Petals' (simulate all peers, and move if that promises a better balance) it has to pay for itself, and peers that decide
at the same time see each other.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.rebalancing.layout import Layout, Worker
from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a move has to bring. The defaults are for peers whose figures are mostly right to 5 %."""

    hysteresis: float = 0.2
    """How much more the pipeline must manage: so many times the root of the summed squares of the throughputs of the
    peers at the two stages. That is how far two sums are off, by chance, if each figure is off by this share: a peer's
    worth is much among few peers and nothing among a thousand."""
    enough: float = 0.5
    """But never more than this share of a usual peer of the two stages: among many, no single move could bring what
    `hysteresis` asks for, and one that turns out wrong costs little."""
    near: float = 0.9
    """A peer moves itself if it brings this share of what the most suitable one would."""
    move_seconds: float = 30.0
    """The time from the last microbatch at the old stage to the first one at the new."""
    stay_seconds: float = 3600.0
    """How long a peer stays in the run: for so long a move pays off."""


DEFAULT = Policy()

_MORE = 1 + 1e-9
"""Than by rounding. A move that only makes another stage the weakest would be taken back by the next one to look."""


def next_check_seconds(rng: random.Random, period_seconds: float) -> float:
    """Time to a peer's next check: `period_seconds` on average, and spread, so that peers do not act at once."""
    return period_seconds * rng.uniform(0.5, 1.5)


def decide(
    layout: Layout,
    own_id: PeerId,
    policy: Policy = DEFAULT,
    *,
    own_rates: Mapping[int, float] | None = None,
    closed: Collection[int] = (),
    waited: bool = False,
) -> int | None:
    """The stage that a peer should move to; None if it should stay where it is.

    Args:
        own_rates: samples per second that this peer has measured itself, at the stages that it has served.
        closed: stages that this peer cannot enter.
        waited: this peer has seen the gap before, and no more suitable one has filled it, so it may go itself.
    """
    own = layout.workers.get(own_id)
    if own is None or not (own.movable and own.serving) or layout.num_serving[own.stage] < 2 or len(layout.costs) < 2:
        return None
    rates = _own_rates(layout, own, own_rates or {})
    before = layout.pipeline_throughput
    # For most checks find all in balance: a quick no.
    most = _best_balance(layout, own, rates) - before
    least = min(_margin(layout, policy, own.stage, stage) for stage in rates if stage != own.stage)
    if layout.throughput[own.stage] - rates[own.stage] < before or most < least:
        return None
    plan = _Plan(layout, own, rates, near=0.0 if waited else policy.near)
    target, best_value, best_gain, lost, num_moves = None, 0.0, 0.0, 0.0, 0
    # Until nothing is left to gain that could be told from an error.
    while most >= best_gain + least and plan.take_step():
        if plan.target in closed:
            break
        lost += plan.rate * policy.move_seconds
        num_moves += 1
        gain = min(plan.throughput) - before
        value = gain * (policy.stay_seconds - policy.move_seconds) - lost
        # A longer plan may look better by an error in another peer's figure, and would make this move look needless.
        if value > best_value and gain >= best_gain + _margin(layout, policy, own.stage, plan.target):
            best_value, best_gain = value, gain
            # Likewise, a small step of it is not worth making for a plan that only looks good.
            if plan.own_target is not None and min(gain, plan.own_share * num_moves) >= _margin(
                layout, policy, own.stage, plan.own_target
            ):
                target = plan.own_target
    return target


def choose_stage(layout: Layout, *, num_before: int = 0, closed: Collection[int] = ()) -> int | None:
    """The stage that a newcomer should serve: the weakest; with several equally weak, the one with fewest peers.

    Args:
        num_before: other newcomers that choose first, by the same rule; all are taken for usual peers.
        closed: stages that cannot be entered.

    Returns:
        None if no stage can be entered.
    """
    throughput, num_workers = list(layout.throughput), list(layout.num_workers)
    choice = None
    for _ in range(num_before + 1):
        open_stages = [stage for stage in range(len(throughput)) if stage not in closed]
        if not open_stages:
            return None
        choice = min(open_stages, key=lambda stage: (throughput[stage], num_workers[stage], stage))
        throughput[choice] += layout.usual_speed / layout.costs[choice]
        num_workers[choice] += 1
    return choice


class _Plan:
    """Moves of all peers, each of the most suitable one, as `own` sees it.

    Attributes:
        throughput: by stage, after the moves so far.
        target, rate: where the last move went, and what its peer managed where it was.
        own_target: where the plan has `own` go.
    """

    def __init__(self, layout: Layout, own: Worker, own_rates: Mapping[int, float], near: float) -> None:
        self.throughput = list(layout.throughput)
        self.target, self.rate = own.stage, 0.0
        self.own_target: int | None = None
        self._own = own
        self._own_rates = own_rates
        self._near = near
        self._costs = layout.costs
        self._num_serving = list(layout.num_serving)
        # Shared with the layout, but for those that change here.
        self._movable = list(layout.movable)
        self._movable[own.stage] = [one for one in layout.movable[own.stage] if one[1] != own.peer_id]

    def take_step(self) -> bool:
        """Make the next move; whether there is one."""
        self.target = target = min(range(len(self.throughput)), key=self.throughput.__getitem__)
        lowest = self.throughput[target]
        sources = [s for s in range(len(self.throughput)) if self._num_serving[s] >= 2 and self.throughput[s] > lowest]
        best = max((found for s in sources if (found := self._best_of(s, target))), default=None)
        own = self._own_level(target) if self.own_target is None and self._own.stage in sources else None
        if own is not None and (best is None or self._is_near(own, best, lowest)):
            self.own_target = target
            self._move(self._own.stage, self._own_rates[self._own.stage], self._own_rates[target])
            return True
        if best is None:
            return False
        _, _, source, position = best
        candidates = self._movable[source]
        speed, _ = candidates[position]
        self._movable[source] = candidates[:position] + candidates[position + 1 :]
        self._move(source, speed / self._costs[source], speed / self._costs[target])
        return True

    @property
    def own_share(self) -> float:
        """By how much the weakest stage would be weaker if `own` stayed and all others moved."""
        if self.own_target is None:
            return 0.0
        without = list(self.throughput)
        without[self.own_target] -= self._own_rates[self.own_target]
        without[self._own.stage] += self._own_rates[self._own.stage]
        return min(self.throughput) - min(without)

    def _own_level(self, target: int) -> tuple[float, float] | None:
        """(level to which the weaker of the two stages rises, what is left at the source) if `own` moves."""
        lowest, left = self.throughput[target], self.throughput[self._own.stage] - self._own_rates[self._own.stage]
        level = min(left, lowest + self._own_rates[target])
        return (level, left) if level > lowest * _MORE else None

    def _is_near(self, own: tuple[float, float], best: tuple[float, float, int, int], lowest: float) -> bool:
        return own[0] - lowest >= self._near * (best[0] - lowest) and own[1] >= self._near * best[1]

    def _best_of(self, source: int, target: int) -> tuple[float, float, int, int] | None:
        """What `_own_level` gives for the best other peer at the source; with the source and the peer's position
        there."""
        candidates, lowest = self._movable[source], self.throughput[target]
        # The slower ones bring less to the target, the faster ones leave less at the source.
        ideal = (self.throughput[source] - lowest) / (1 / self._costs[source] + 1 / self._costs[target])
        middle = bisect_left(candidates, (ideal, ""))
        found = []
        for position in (middle - 1, middle):
            if 0 <= position < len(candidates):
                speed, _ = candidates[position]
                left = self.throughput[source] - speed / self._costs[source]
                level = min(left, lowest + speed / self._costs[target])
                found.append((level, left, source, position))
        best = max(found, default=None)
        return best if best is not None and best[0] > lowest * _MORE else None

    def _move(self, source: int, loses: float, gains: float) -> None:
        self.rate = loses
        self.throughput[source] -= loses
        self.throughput[self.target] += gains
        self._num_serving[source] -= 1


def _own_rates(layout: Layout, own: Worker, measured: Mapping[int, float]) -> dict[int, float]:
    speed = layout.speed(own)
    rates = {stage: speed / cost for stage, cost in enumerate(layout.costs)}
    elsewhere = {stage: rate for stage, rate in measured.items() if rate > 0 and stage != own.stage}
    return rates | elsewhere


def _best_balance(layout: Layout, own: Worker, rates: Mapping[int, float]) -> float:
    """What the weakest stage would manage if all were spread perfectly."""
    fastest = max(rate * cost for rate, cost in zip(rates.values(), layout.costs, strict=True))
    return (layout.total_speed - layout.speed(own) + fastest) / sum(layout.costs)


def _margin(layout: Layout, policy: Policy, one: int, other: int) -> float:
    root = math.sqrt(layout.squares[one] + layout.squares[other])
    num_peers = layout.num_workers[one] + layout.num_workers[other]
    return root * min(policy.hysteresis, policy.enough / math.sqrt(max(1, num_peers)))
