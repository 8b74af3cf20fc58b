"""A plan of moves that strengthen the weakest block again and again, each made by the most suitable peer.

Every peer makes such a plan of all peers, and moves if there is a move of its own in it (swarm.rebalancing.decision).
A peer knows only its own room: of others it expects no longer spans than they have, and where there are several paths
that they enter one block at a time, since there may be thousands of spans.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from swarm.rebalancing.layout import Layout, Span, Worker, all_spans
from swarm.types import Block, PeerId

MORE = 1 + 1e-9
"""The factor by which a move must raise the weakest block, beyond rounding. A move that only makes another block the
weakest would be undone by the next peer to look."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A move from a span to another one: of the own peer, or of any peer, for each unit of its speed.

    Attributes:
        gains: what the peer will add to each block of the span `after`.
        changes: by how much the throughput of the blocks of both spans changes.
        left: the blocks that are only in the span `before`.
    """

    before: Span
    after: Span
    gains: float
    changes: Mapping[Block, float]
    left: Collection[Block]

    @classmethod
    def of(cls, before: Span, after: Span, *, loses: float, gains: float) -> "Move":
        """The move of a peer that now adds `loses` to each block of its span."""
        changes = dict.fromkeys(before, -loses)
        for block in after:
            changes[block] = changes.get(block, 0.0) + gains
        return cls(before=before, after=after, gains=gains, changes=changes, left={*before}.difference(after))

    @property
    def entered(self) -> set[Block]:
        return {*self.after} - {*self.before}

    def lowest_left(self, throughput: Mapping[Block, float], speed: float = 1.0) -> float:
        """The throughput, after the move, of the weakest block from which it takes."""
        changes = self.changes.items()
        return min([throughput[b] + speed * change for b, change in changes if change < 0], default=math.inf)

    def level(self, throughput: Mapping[Block, float], speed: float = 1.0) -> float:
        """The throughput, after the move, of the weakest block that it changes."""
        return min([throughput[block] + speed * change for block, change in self.changes.items()])

    def ideal_speed(self, throughput: Mapping[Block, float]) -> float:
        """The speed at which `level` is highest, of a move for a speed of 1. Slower peers bring less, and faster ones
        take more away."""
        rates = [(throughput[block], change) for block, change in self.changes.items()]
        # Blocks that do not count have infinite throughput.
        falling = [(rate, change) for rate, change in rates if change < 0 and rate < math.inf]
        rising = [(rate, change) for rate, change in rates if change > 0 and rate < math.inf]
        return max(min(((t - r) / (up - down) for t, down in falling), default=math.inf) for r, up in rising)


class _Worth(NamedTuple):
    """What a move in a plan is worth, the larger the better: the throughput after it of the weakest of all blocks, of
    the weakest that it changes, and of the weakest from which it takes."""

    pipeline: float
    level: float
    left: float


_NOTHING = (-math.inf, -math.inf)


class Plan:
    """A plan of moves, each by the most suitable peer, from the view of the peer `own`.

    Attributes:
        throughput: the throughput of each block after the moves so far.
        target: the weakest block before the last move, which that move made stronger.
        lost: the samples per second that the last moved peer computed at the blocks that it left.
        own: the move of the peer `own` in this plan; None if there is none.
        own_target: the target of that move.
    """

    def __init__(self, layout: Layout, own: Worker, moves: Sequence[Move], near: float) -> None:
        self.throughput = dict(layout.throughput)
        self._ranked = self._by_rate()
        self.target, self.lost = own.span[0], 0.0
        self.own: Move | None = None
        self.own_target = self.target
        self._own_moves = moves
        self._near = near
        self._layout = layout
        self._cost = cache(layout.cost)
        self._num_serving = dict(layout.num_serving)
        # The inner lists are shared with the layout, and replaced where the plan changes them.
        self._movable = dict(layout.movable)
        self._movable[own.span] = [one for one in layout.movable[own.span] if one[1] != own.peer_id]
        longest = max((len(span) for span, peers in self._movable.items() if peers), default=0)
        self._spans = dict.fromkeys(all_spans(layout.paths, longest))
        self._kept = set[Block]()
        """The blocks that can spare nobody for the target."""
        self._moves = dict[tuple[Span, Block], list[Move]]()

    def take_step(self) -> bool:
        """Make the next move. Returns whether there is one."""
        lowest = min(self.throughput.values())
        # Blocks of one span are often equally weak, and not each of them can be helped.
        return any(self._strengthen(block) for block, rate in self.throughput.items() if rate <= lowest * MORE)

    def _strengthen(self, target: Block) -> bool:
        self.target = target
        lowest = self.throughput[target]
        self._kept = {b for b, rate in self.throughput.items() if rate <= lowest or self._num_serving[b] < 2}
        best: tuple[_Worth, Span, int, Move] | None = None
        # Most peers cannot make the best move, which is soon seen once a good one is known.
        sources = [(self._most_from(span, peers), span, peers) for span, peers in self._movable.items() if peers]
        for most_from, span, candidates in sorted(sources, reverse=True):
            if most_from <= _NOTHING or (best is not None and most_from < best[0][:2]):
                break
            for move in self._moves_of_others(span, target):
                most = self._most(move, candidates[0][0], candidates[-1][0]) if self._is_allowed(move) else _NOTHING
                if most <= _NOTHING or (best is not None and most < best[0][:2]):
                    continue
                found = self._best_of(move)
                if found is not None and (best is None or found[:-1] > best[:-1]):
                    best = found
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

    def _is_allowed(self, move: Move) -> bool:
        """Whether a move strengthens the weakest block, and leaves only others that can spare a peer."""
        return move.changes.get(self.target, 0.0) > 0 and self._kept.isdisjoint(move.left)

    def _most_from(self, span: Span, candidates: Sequence[tuple[float, PeerId]]) -> tuple[float, float]:
        """What a move from a span to the target is worth at most, without the last figure; _NOTHING if it is no use."""
        target, lowest = self.target, self.throughput[self.target]
        # It leaves what the span has at the target's stage, or else some other block.
        leaves = [b for b in span if b.stage == target.stage and b != target] or [b for b in span if b != target]
        spared = max((self.throughput[block] for block in leaves if block not in self._kept), default=0.0)
        level = min(
            lowest + candidates[-1][0] / self._layout.work[target],
            spared - candidates[0][0] / self._cost(span),
        )
        if level <= lowest * MORE:
            return _NOTHING
        # Along several paths a move changes nothing else.
        return min(level, self._elsewhere({target, *span}) if len(self._layout.paths) > 1 else math.inf), level

    def _most(self, move: Move, slowest: float, fastest: float) -> tuple[float, float]:
        """What a move by peers of such speeds is worth at most, without the last figure; _NOTHING if it is no use."""
        rates = self.throughput
        level = min([rates[block] + (fastest if c > 0 else slowest) * c for block, c in move.changes.items()])
        if level <= rates[self.target] * MORE:
            return _NOTHING
        return min(level, self._elsewhere(move.changes)), level

    def _elsewhere(self, changed: Collection[Block]) -> float:
        """The throughput of the weakest of the blocks that are not changed."""
        return next((rate for rate, block in self._ranked if block not in changed), math.inf)

    def _by_rate(self) -> list[tuple[float, Block]]:
        """The blocks with their throughputs, the weakest first."""
        return sorted((rate, block) for block, rate in self.throughput.items())

    def _worth(self, move: Move, speed: float = 1.0) -> _Worth:
        level = move.level(self.throughput, speed)
        return _Worth(min(level, self._elsewhere(move.changes)), level, move.lowest_left(self.throughput, speed))

    def _best_own(self) -> tuple[_Worth, Move] | None:
        found = [(self._worth(move), -len(move.entered), move) for move in self._own_moves if self._is_allowed(move)]
        worth, _, move = max(found, key=lambda one: one[:-1], default=(_Worth(0.0, 0.0, 0.0), 0, None))
        return (worth, move) if move and worth.level > self.throughput[self.target] * MORE else None

    def _is_near(self, own: _Worth, best: _Worth) -> bool:
        """Whether the own move may be made instead of the best one."""
        lowest, near = self.throughput[self.target], self._near
        gains, best_gains = ((worth.pipeline - lowest, worth.level - lowest, worth.left) for worth in (own, best))
        is_near = all(gain >= near * most for gain, most in zip(gains, best_gains, strict=True))
        return is_near or near * gains[0] > best_gains[0]

    def _moves_of_others(self, span: Span, target: Block) -> list[Move]:
        """The moves from a span that strengthen a block."""
        if (span, target) not in self._moves:
            if len(self._layout.paths) == 1:
                going = [after for after in self._spans if target in after and len(after) <= len(span)]
            else:
                at_stage, most = {block.stage: block for block in span} | {target.stage: target}, len(span)
                firsts = range(target.stage - most + 1, target.stage + 1)
                ranges = (range(first, end) for first in firsts for end in range(target.stage + 1, first + most + 1))
                ways = [tuple(at_stage[stage] for stage in stages if stage in at_stage) for stages in ranges]
                going = [way for way in ways if way in self._spans]
            cost = self._cost
            self._moves[span, target] = [
                Move.of(span, after, loses=1 / cost(span), gains=1 / cost(after))
                for after in dict.fromkeys(going)
                if after != span
            ]
        return self._moves[span, target]

    def _best_of(self, move: Move) -> tuple[_Worth, Span, int, Move] | None:
        """The best other peer that can make a move, as its position among those of its span."""
        candidates = self._movable[move.before]
        middle = bisect_left(candidates, (move.ideal_speed(self.throughput), ""))
        found = [
            (self._worth(move, candidates[position][0]), move.before, position, move)
            for position in (middle - 1, middle) if 0 <= position < len(candidates)
        ]  # fmt: skip
        best = max(found, key=lambda one: one[:-1], default=None)
        return best if best is not None and best[0].level > self.throughput[self.target] * MORE else None

    def _make(self, move: Move, speed: float) -> None:
        for block, change in move.changes.items():
            self.throughput[block] += speed * change
        self._ranked = self._by_rate()
        for block in move.left:
            self._num_serving[block] -= 1
        for block in move.entered:
            self._num_serving[block] += 1
        # Where nothing is trained nothing is lost, and elsewhere only the samples that pass the block.
        losing = [block for block in move.left if self.throughput[block] < math.inf]
        self.lost = -speed * min((move.changes[block] * self._layout.shares[block] for block in losing), default=0.0)
