"""Should this peer stay, or move to another stage? And where should a newcomer go?

Pure: the same layout gives the same answer. Knows neither the DHT nor how a move is done; a peer that is on its way
counts as arrived.

A pipeline is as fast as its weakest stage. Every peer plans for all: its plan takes again and again the move that
strengthens the weakest stage most, until no move does. The peer moves if the plan, up to the point where it pays best,
contains a move of its own. If several peers would bring about the same gain, each of them sees itself in its plan. So
the first one to look moves, without waiting for a particular peer's turn, and the others see its claim.

Compared with SWARM's rule (every T seconds one peer moves from the stage with the shortest queues to the one with the
longest) a move has to bring something, several gaps are filled at once, and a stage is never emptied. Compared with
Petals' rule (simulate all peers, and move if that promises a better balance) a move has to pay for itself, and peers
that decide at the same time see each other.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.rebalancing.layout import Layout, Worker
from swarm.types import Block, PeerId


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The gain that a move must bring. The defaults are for peers whose figures are mostly right to 5 %."""

    hysteresis: float = 0.2
    """The gain that the pipeline's throughput must have, as a multiple of the root of the summed squares of the
    throughputs of all peers at the two stages. If each peer's figure were off by this share at random, the two stages'
    sums would be off by that much. One peer stands out from such errors among few peers, but not among a thousand."""
    enough: float = 0.5
    """The most gain that is asked for, as a share of a usual peer of the two stages. Among many peers no single move
    could bring the gain that `hysteresis` asks for, and a wrong move costs little."""
    near: float = 0.9
    """A peer moves itself if its move brings at least this share of what the most suitable peer's would."""
    move_seconds: float = 30.0
    """The time from the last microbatch at the old stage to the first one at the new stage."""
    stay_seconds: float = 3600.0
    """How long a peer stays in the run, and so how long a move pays off."""


DEFAULT = Policy()

_MORE = 1 + 1e-9
"""The factor by which a move must raise the weakest stage, beyond rounding. A move that only makes another stage the
weakest would be undone by the next peer to look."""


def next_check_seconds(rng: random.Random, period_seconds: float) -> float:
    """The time to a peer's next check: `period_seconds` on average, but random, so that peers do not act together."""
    return period_seconds * rng.uniform(0.5, 1.5)


def decide(
    layout: Layout,
    own_id: PeerId,
    policy: Policy = DEFAULT,
    *,
    own_rates: Mapping[Block, float] | None = None,
    closed: Collection[Block] = (),
    waited: bool = False,
) -> Block | None:
    """The block that a peer should move to; None if it should stay where it is.

    Args:
        own_rates: samples per second that this peer has measured itself, at the blocks that it has served.
        closed: blocks that this peer cannot enter.
        waited: whether this peer has seen the gap before and no more suitable peer has filled it since, so that it may
            move itself.
    """
    own = layout.workers.get(own_id)
    if own is None or not (own.movable and own.serving) or layout.num_serving[own.block] < 2 or len(layout.costs) < 2:
        return None
    rates = _own_rates(layout, own, own_rates or {})
    before = layout.pipeline_throughput
    # Most checks find the stages in balance, and end here without a plan.
    most = _best_balance(layout, own, rates) - before
    least = min(_margin(layout, policy, own.block, block) for block in rates if block != own.block)
    if layout.throughput[own.block] - rates[own.block] < before or most < least:
        return None
    plan = _Plan(layout, own, rates, near=0.0 if waited else policy.near)
    target: Block | None = None
    best_value, best_gain, lost, num_moves = 0.0, 0.0, 0.0, 0
    # The plan goes on as long as the gain that is still possible is larger than the possible error of the figures.
    while most >= best_gain + least and plan.take_step():
        if plan.target in closed:
            break
        lost += plan.rate * policy.move_seconds
        num_moves += 1
        gain = min(plan.throughput.values()) - before
        value = gain * (policy.stay_seconds - policy.move_seconds) - lost
        # A longer plan must gain clearly more than a shorter one: an error in another peer's figure may make it look
        # better, and this peer's move look needless.
        if value > best_value and gain >= best_gain + _margin(layout, policy, own.block, plan.target):
            best_value, best_gain = value, gain
            # This peer's own move, too, must bring more than an error could.
            if plan.own_target is not None and min(gain, plan.own_share * num_moves) >= _margin(
                layout, policy, own.block, plan.own_target
            ):
                target = plan.own_target
    return target


def choose_block(layout: Layout, *, num_before: int = 0, closed: Collection[Block] = ()) -> Block | None:
    """The block that a newcomer should serve: the weakest; of several equally weak ones, the one with fewest peers.

    Args:
        num_before: how many other newcomers choose first by the same rule. All newcomers count as usual peers.
        closed: blocks that cannot be entered.

    Returns:
        None if no block can be entered.
    """
    throughput, num_workers = dict(layout.throughput), dict(layout.num_workers)
    choice = None
    for _ in range(num_before + 1):
        open_blocks = [block for block in throughput if block not in closed]
        if not open_blocks:
            return None
        choice = min(open_blocks, key=lambda block: (throughput[block], num_workers[block], block))
        throughput[choice] += layout.usual_speed / layout.costs[choice]
        num_workers[choice] += 1
    return choice


class _Plan:
    """A plan of moves, each by the most suitable peer, from the view of the peer `own`.

    Attributes:
        throughput: the throughput of each block after the moves so far.
        target: the block to which the last move went.
        rate: the throughput that the last moved peer had at its former block.
        own_target: the block to which the plan moves `own`; None if it does not.
    """

    def __init__(self, layout: Layout, own: Worker, own_rates: Mapping[Block, float], near: float) -> None:
        self.throughput = dict(layout.throughput)
        self.target, self.rate = own.block, 0.0
        self.own_target: Block | None = None
        self._own = own
        self._own_rates = own_rates
        self._near = near
        self._costs = layout.costs
        self._num_serving = dict(layout.num_serving)
        # The inner lists are shared with the layout, and replaced where the plan changes them.
        self._movable = dict(layout.movable)
        self._movable[own.block] = [one for one in layout.movable[own.block] if one[1] != own.peer_id]

    def take_step(self) -> bool:
        """Make the next move. Returns whether there is one."""
        self.target = target = min(self.throughput, key=self.throughput.__getitem__)
        lowest = self.throughput[target]
        sources = [b for b, rate in self.throughput.items() if self._num_serving[b] >= 2 and rate > lowest]
        best = max((found for s in sources if (found := self._best_of(s, target))), default=None)
        own = self._own_level(target) if self.own_target is None and self._own.block in sources else None
        if own is not None and (best is None or self._is_near(own, best, lowest)):
            self.own_target = target
            self._move(self._own.block, self._own_rates[self._own.block], self._own_rates[target])
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
        """By how much weaker the weakest stage would be if `own` stayed and the plan's other moves were made."""
        if self.own_target is None:
            return 0.0
        without = dict(self.throughput)
        without[self.own_target] -= self._own_rates[self.own_target]
        without[self._own.block] += self._own_rates[self._own.block]
        return min(self.throughput.values()) - min(without.values())

    def _own_level(self, target: Block) -> tuple[float, float] | None:
        """If `own` moves: the throughput of the weaker of the two stages, and what is left at its former stage.

        None if the move would not raise the weakest stage.
        """
        lowest, left = self.throughput[target], self.throughput[self._own.block] - self._own_rates[self._own.block]
        level = min(left, lowest + self._own_rates[target])
        return (level, left) if level > lowest * _MORE else None

    def _is_near(self, own: tuple[float, float], best: tuple[float, float, Block, int], lowest: float) -> bool:
        return own[0] - lowest >= self._near * (best[0] - lowest) and own[1] >= self._near * best[1]

    def _best_of(self, source: Block, target: Block) -> tuple[float, float, Block, int] | None:
        """The result of `_own_level` for the best other peer at a source, with the source and its position there."""
        candidates, lowest = self._movable[source], self.throughput[target]
        # Peers slower than `ideal` bring less to the target, and faster ones leave less at the source.
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

    def _move(self, source: Block, loses: float, gains: float) -> None:
        self.rate = loses
        self.throughput[source] -= loses
        self.throughput[self.target] += gains
        self._num_serving[source] -= 1


def _own_rates(layout: Layout, own: Worker, measured: Mapping[Block, float]) -> dict[Block, float]:
    speed = layout.speed(own)
    rates = {block: speed / cost for block, cost in layout.costs.items()}
    elsewhere = {block: rate for block, rate in measured.items() if rate > 0 and block != own.block}
    return rates | elsewhere


def _best_balance(layout: Layout, own: Worker, rates: Mapping[Block, float]) -> float:
    """The throughput that the weakest stage would have if all work were spread perfectly."""
    fastest = max(rate * cost for rate, cost in zip(rates.values(), layout.costs.values(), strict=True))
    return (layout.total_speed - layout.speed(own) + fastest) / sum(layout.costs.values())


def _margin(layout: Layout, policy: Policy, one: Block, other: Block) -> float:
    root = math.sqrt(layout.squares[one] + layout.squares[other])
    num_peers = layout.num_workers[one] + layout.num_workers[other]
    return root * min(policy.hysteresis, policy.enough / math.sqrt(max(1, num_peers)))
