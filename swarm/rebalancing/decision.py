"""Should this peer stay, or move to other blocks? And where should a newcomer go?

Pure: the same layout gives the same answer. Knows neither the DHT nor how a move is done; a peer that is on its way
counts as arrived.

A pipeline is as fast as its weakest block. A peer serves a span of adjacent blocks, and every sample takes the time of
all of them there: so it adds less to each block the more it serves. A move may shift its span, widen it or narrow it,
and what is in both spans stays.

Every peer plans for all: its plan takes again and again the move that strengthens the weakest block most, until no move
does. The peer moves if the plan, up to the point where it pays best, contains a move of its own. If several peers would
bring about the same gain, each of them sees itself in its plan. So the first one to look moves, without waiting for a
particular peer's turn, and the others see its claim. A peer knows only its own room: of others it expects no longer
spans than they have.

Compared with SWARM's rule (every T seconds one peer moves from the stage with the shortest queues to the one with the
longest) a move has to bring something, several gaps are filled at once, and a stage is never emptied. Compared with
Petals' rule (simulate all peers, and move if that promises a better balance) a move has to pay for itself, and peers
that decide at the same time see each other.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.rebalancing.layout import Layout, Span, Worker, all_spans
from swarm.types import Block, PeerId


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The gain that a move must bring. The defaults are for peers whose figures are mostly right to 5 %."""

    hysteresis: float = 0.2
    """The gain that the pipeline's throughput must have, as a multiple of the root of the summed squares of the
    throughputs of all peers at the two blocks. If each peer's figure were off by this share at random, the two blocks'
    sums would be off by that much. One peer stands out from such errors among few peers, but not among a thousand. It
    is never more than this share of what the pipeline manages now."""
    enough: float = 0.5
    """The most gain that is asked for, as a share of a usual peer of the two blocks. Among many peers no single move
    could bring the gain that `hysteresis` asks for, and a wrong move costs little."""
    near: float = 0.9
    """A peer moves itself if its move brings at least this share of what the most suitable peer's would."""
    move_seconds: float = 30.0
    """The time from the last microbatch at the blocks that it leaves to the first one at the new ones."""
    stay_seconds: float = 3600.0
    """How long a peer stays in the run, and so how long a move pays off."""


DEFAULT = Policy()

_MORE = 1 + 1e-9
"""The factor by which a move must raise the weakest block, beyond rounding. A move that only makes another block the
weakest would be undone by the next peer to look."""


def next_check_seconds(rng: random.Random, period_seconds: float) -> float:
    """The time to a peer's next check: `period_seconds` on average, but random, so that peers do not act together."""
    return period_seconds * rng.uniform(0.5, 1.5)


def decide(
    layout: Layout,
    own_id: PeerId,
    policy: Policy = DEFAULT,
    *,
    spans: Collection[Span] | None = None,
    own_rates: Mapping[Block, float] | None = None,
    closed: Collection[Block | Span] = (),
    waited: bool = False,
) -> Span | None:
    """The span that a peer should move to; None if it should stay where it is.

    Args:
        spans: those for which this peer has room; None: any single block.
        own_rates: samples per second that this peer has measured itself, at single blocks that it has served.
        closed: blocks that this peer cannot enter, and spans to which it cannot move.
        waited: whether this peer has seen the gap before and no more suitable peer has filled it since, so that it may
            move itself.
    """
    own = layout.workers.get(own_id)
    if own is None or own.missing or not own.movable or len(layout.costs) < 2:
        return None
    before = layout.pipeline_throughput
    moves = _own_moves(layout, own, own_rates or {}, all_spans([*layout.costs], 1) if spans is None else spans)
    # Most checks find the blocks in balance, and end here without a plan.
    most = _best_balance(layout, own, moves) - before
    targets = [block for block in layout.costs if own.span != (block,)]
    least = min(_margin(layout, policy, own.span, block) for block in targets)
    # While the peer moves, and after it has, none of the blocks from which it takes is to be weaker than the weakest.
    moves = [
        move for move in moves
        if not {*closed} & {move.after, *move.entered} and move.lowest_left(layout.throughput) >= before
        and all(layout.num_serving[block] >= 2 for block in move.left)
    ]  # fmt: skip
    if not moves or most < least:
        return None
    plan = _Plan(layout, own, moves, near=0.0 if waited else policy.near)
    target: Span | None = None
    best_value, best_gain, lost, num_moves = 0.0, 0.0, 0.0, 0
    # The plan goes on as long as the gain that is still possible is larger than the possible error of the figures.
    while most >= best_gain + least and plan.take_step():
        if plan.target in closed and plan.target not in own.span:
            break
        lost += plan.lost * policy.move_seconds
        num_moves += 1
        gain = min(plan.throughput.values()) - before
        value = gain * (policy.stay_seconds - policy.move_seconds) - lost
        # A longer plan must gain clearly more than a shorter one: an error in another peer's figure may make it look
        # better, and this peer's move look needless.
        if value > best_value and gain >= best_gain + _margin(layout, policy, own.span, plan.target):
            best_value, best_gain = value, gain
            # This peer's own move, too, must bring more than an error could.
            share = min(gain, plan.own_share * num_moves)
            if plan.own is not None and share >= _margin(layout, policy, own.span, plan.own_target):
                target = plan.own.after
    return target


def choose_span(
    layout: Layout, spans: Collection[Span], *, num_before: int = 0, closed: Collection[Block] = ()
) -> Span | None:
    """The span that a newcomer should serve: the one with which the pipeline is fastest. Of several such it is the one
    that leaves the fewest blocks as weak as the weakest, then the one with the weakest block (of several equally weak
    ones, with the fewest peers), then the shortest.

    Args:
        spans: those for which the newcomer has room.
        num_before: how many other newcomers choose first by the same rule. All newcomers count as usual peers, with
            room for the same spans.
        closed: blocks that cannot be entered.

    Returns:
        None if no span can be entered.
    """
    throughput, num_workers = dict(layout.throughput), dict(layout.num_workers)
    spans = [span for span in spans if not set(closed) & set(span)]

    def merit(span: Span) -> tuple[float, int, int, int]:
        rate = layout.usual_speed / layout.cost(span)
        after = [throughput[block] + rate * (block in span) for block in throughput]
        lowest = min(after)
        neediest = min(map(by_need.index, span))
        return lowest, -sum(one <= lowest * _MORE for one in after), -neediest, -len(span)

    choice = None
    for _ in range(num_before + 1):
        by_need = sorted(throughput, key=lambda block: (throughput[block], num_workers[block], block))
        choice = max(spans, key=merit, default=None)
        for block in choice or ():
            throughput[block] += layout.usual_speed / layout.cost(choice or ())
            num_workers[block] += 1
    return choice


@dataclass(frozen=True, kw_only=True)
class _Move:
    """A move from a span to another one: of the own peer, or of any peer, for each unit of its speed.

    Attributes:
        gains: what the peer will add to each block of the span `after`.
        changes: by how much the throughput of the blocks of both spans changes.
    """

    before: Span
    after: Span
    gains: float
    changes: Mapping[Block, float]

    @classmethod
    def of(cls, before: Span, after: Span, *, loses: float, gains: float) -> "_Move":
        """The move of a peer that now adds `loses` to each block of its span."""
        changes = dict.fromkeys(before, -loses)
        for block in after:
            changes[block] = changes.get(block, 0.0) + gains
        return cls(before=before, after=after, gains=gains, changes=changes)

    @property
    def left(self) -> set[Block]:
        return {*self.before} - {*self.after}

    @property
    def entered(self) -> set[Block]:
        return {*self.after} - {*self.before}

    def lowest_left(self, throughput: Mapping[Block, float], speed: float = 1.0) -> float:
        """The throughput, after the move, of the weakest block from which it takes."""
        changes = self.changes.items()
        return min((throughput[b] + speed * change for b, change in changes if change < 0), default=math.inf)

    def level(self, throughput: Mapping[Block, float], speed: float = 1.0) -> float:
        """The throughput, after the move, of the weakest block that it changes."""
        return min(throughput[block] + speed * change for block, change in self.changes.items())

    def ideal_speed(self, throughput: Mapping[Block, float]) -> float:
        """The speed at which `level` is highest, of a move for a speed of 1. Slower peers bring less, and faster ones
        take more away."""
        falling = [(throughput[block], change) for block, change in self.changes.items() if change < 0]
        rising = [(throughput[block], change) for block, change in self.changes.items() if change > 0]
        return max(min((t - r) / (up - down) for t, down in falling) for r, up in rising)


class _Worth(NamedTuple):
    """What a move in a plan is worth, the larger the better: the throughput after it of the weakest of all blocks, of
    the weakest that it changes, and of the weakest from which it takes."""

    pipeline: float
    level: float
    left: float


class _Plan:
    """A plan of moves, each by the most suitable peer, from the view of the peer `own`.

    Attributes:
        throughput: the throughput of each block after the moves so far.
        target: the weakest block before the last move, which that move made stronger.
        lost: the throughput that the last moved peer had at the blocks that it left.
        own: the move of the peer `own` in this plan; None if there is none.
        own_target: the target of that move.
    """

    def __init__(self, layout: Layout, own: Worker, moves: Sequence[_Move], near: float) -> None:
        self.throughput = dict(layout.throughput)
        self.target, self.lost = own.span[0], 0.0
        self.own: _Move | None = None
        self.own_target = self.target
        self._own_moves = moves
        self._near = near
        self._layout = layout
        self._num_serving = dict(layout.num_serving)
        # The inner lists are shared with the layout, and replaced where the plan changes them.
        self._movable = dict(layout.movable)
        self._movable[own.span] = [one for one in layout.movable[own.span] if one[1] != own.peer_id]
        self._moves = {span: list(_moves_of_others(layout, span)) for span, peers in self._movable.items() if peers}

    def take_step(self) -> bool:
        """Make the next move. Returns whether there is one."""
        lowest = min(self.throughput.values())
        # Blocks of one span are often equally weak, and not each of them can be helped.
        return any(self._strengthen(block) for block, rate in self.throughput.items() if rate <= lowest * _MORE)

    def _strengthen(self, target: Block) -> bool:
        self.target = target
        found = (self._best_of(move) for moves in self._moves.values() for move in moves if self._is_allowed(move))
        best = max((one for one in found if one is not None), key=lambda one: one[:-1], default=None)
        own = self._best_own() if self.own is None else None
        if own is not None and (best is None or self._is_near(own[0], best[0])):
            self.own, self.own_target = own[1], target
            self._make(own[1], 1.0)
            return True
        if best is None:
            return False
        *_, position, move = best
        candidates = self._movable[move.before]
        speed, _ = candidates[position]
        self._movable[move.before] = candidates[:position] + candidates[position + 1 :]
        self._make(move, speed)
        return True

    @property
    def own_share(self) -> float:
        """By how much weaker the weakest block would be if `own` stayed and the plan's other moves were made."""
        if self.own is None:
            return 0.0
        without = {block: rate - self.own.changes.get(block, 0.0) for block, rate in self.throughput.items()}
        return min(self.throughput.values()) - min(without.values())

    def _is_allowed(self, move: _Move) -> bool:
        """Whether a move strengthens the weakest block, and leaves only others that can spare a peer."""
        lowest = self.throughput[self.target]
        return move.changes.get(self.target, 0.0) > 0 and all(
            self._num_serving[block] >= 2 and self.throughput[block] > lowest for block in move.left
        )

    def _worth(self, move: _Move, speed: float = 1.0) -> _Worth:
        level = move.level(self.throughput, speed)
        elsewhere = (rate for block, rate in self.throughput.items() if block not in move.changes)
        return _Worth(min([level, *elsewhere]), level, move.lowest_left(self.throughput, speed))

    def _best_own(self) -> tuple[_Worth, _Move] | None:
        found = [(self._worth(move), -len(move.entered), move) for move in self._own_moves if self._is_allowed(move)]
        worth, _, move = max(found, key=lambda one: one[:-1], default=(_Worth(0.0, 0.0, 0.0), 0, None))
        return (worth, move) if move and worth.level > self.throughput[self.target] * _MORE else None

    def _is_near(self, own: _Worth, best: _Worth) -> bool:
        """Whether the own move may be made instead of the best one."""
        lowest, near = self.throughput[self.target], self._near
        gains, best_gains = ((worth.pipeline - lowest, worth.level - lowest, worth.left) for worth in (own, best))
        is_near = all(gain >= near * most for gain, most in zip(gains, best_gains, strict=True))
        return is_near or near * gains[0] > best_gains[0]

    def _best_of(self, move: _Move) -> tuple[_Worth, Span, int, _Move] | None:
        """The best other peer that can make a move, as its position among those of its span."""
        candidates = self._movable[move.before]
        middle = bisect_left(candidates, (move.ideal_speed(self.throughput), ""))
        found = [
            (self._worth(move, candidates[position][0]), move.before, position, move)
            for position in (middle - 1, middle) if 0 <= position < len(candidates)
        ]  # fmt: skip
        best = max(found, key=lambda one: one[:-1], default=None)
        return best if best is not None and best[0].level > self.throughput[self.target] * _MORE else None

    def _make(self, move: _Move, speed: float) -> None:
        for block, change in move.changes.items():
            self.throughput[block] += speed * change
        for block in move.left:
            self._num_serving[block] -= 1
        for block in move.entered:
            self._num_serving[block] += 1
        self.lost = -speed * min((move.changes[block] for block in move.left), default=0.0)


def _moves_of_others(layout: Layout, span: Span) -> Iterator[_Move]:
    for after in all_spans([*layout.costs], len(span)):
        if after != span:
            yield _Move.of(span, after, loses=1 / layout.cost(span), gains=1 / layout.cost(after))


def _own_moves(layout: Layout, own: Worker, measured: Mapping[Block, float], spans: Collection[Span]) -> list[_Move]:
    speed = layout.speed(own)
    # Of the blocks where it is, what it announces is newer than what it measured before.
    elsewhere = {block: rate for block, rate in measured.items() if rate > 0 and block not in own.span}
    seconds = {block: cost / speed for block, cost in layout.costs.items()}
    seconds |= {block: 1 / rate for block, rate in elsewhere.items()}
    loses = speed / layout.cost(own.span)
    gains = {span: 1 / sum(seconds[block] for block in span) for span in spans if span != own.span}
    return [_Move.of(own.span, span, loses=loses, gains=gain) for span, gain in gains.items()]


def _best_balance(layout: Layout, own: Worker, moves: Sequence[_Move]) -> float:
    """The throughput that the weakest block would have if all work were spread perfectly."""
    fastest = max((move.gains * layout.cost(move.after) for move in moves), default=0.0)
    own_speed = layout.speed(own)
    return (layout.total_speed - own_speed + max(own_speed, fastest)) / sum(layout.costs.values())


def _margin(layout: Layout, policy: Policy, span: Span, target: Block) -> float:
    """The gain that a move from a span has to bring to a block: by the figures of the block and of the span, but no
    more than if all figures of the weakest block were off alike."""
    margins = []
    for block in [one for one in span if one != target] or [target]:
        root = math.sqrt(layout.squares[block] + layout.squares[target])
        num_peers = layout.num_workers[block] + layout.num_workers[target]
        margins.append(root * min(policy.hysteresis, policy.enough / math.sqrt(max(1, num_peers))))
    return min(max(margins), policy.hysteresis * layout.pipeline_throughput)
