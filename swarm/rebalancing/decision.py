"""Should this peer stay, or move to other blocks? And where should a newcomer go?

Pure: the same layout gives the same answer. Knows neither the DHT nor how a move is done; a peer that is on its way
counts as arrived.

A pipeline is as fast as its weakest block. A peer serves a span of adjacent blocks, and every sample takes the time of
all of them there: so it adds less to each block the more it serves. A move may shift its span, widen it or narrow it,
and what is in both spans stays.

Every peer plans for all: its plan takes again and again the move that strengthens the weakest block most, until no move
does. The peer moves if the plan, up to the point where it pays best, contains a move of its own. If several peers would
bring about the same gain, each of them sees itself in its plan. So the first one to look moves, without waiting for a
particular peer's turn, and the others see its claim.

Where stages have variants, a path stands still while one of its blocks has no peers, and does not hold up the others.
So first of all peers make one more path whole; where they cannot, they strengthen the weakest block of those that are.

Compared with SWARM's rule (every T seconds one peer moves from the stage with the shortest queues to the one with the
longest) a move has to bring something, several gaps are filled at once, and a stage is never emptied. Compared with
Petals' rule (simulate all peers, and move if that promises a better balance) a move has to pay for itself, and peers
that decide at the same time see each other.
"""

import functools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.rebalancing.layout import Layout, Span, Worker, all_spans
from swarm.rebalancing.plan import MORE, Move, Plan
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
    spans = all_spans(layout.paths, 1) if spans is None else spans
    for scope in layout.scopes(closed):
        moves = _own_moves(scope, own, own_rates or {}, spans)
        gain, target = _target(scope, policy, own, moves, closed, near=0.0 if waited else policy.near)
        if gain:
            return target
    return None


def _target(
    layout: Layout, policy: Policy, own: Worker, moves: Sequence[Move], closed: Collection[Block | Span], near: float
) -> tuple[float, Span | None]:
    """What is won for the blocks that count by the best plan, and the span to which the own peer moves in it."""
    before = layout.pipeline_throughput
    # Most checks find the blocks in balance, and end here without a plan.
    most = _best_balance(layout, own, moves) - before
    targets = [block for block in layout.counting if own.span != (block,)]
    least = min((_margin(layout, policy, own.span, block) for block in targets), default=math.inf)
    # While the peer moves, and after it has, none of the blocks from which it takes is to be weaker than the weakest.
    moves = [
        move for move in moves
        if not {*closed} & {move.after, *move.entered} and move.lowest_left(layout.throughput) >= before
        and all(layout.num_serving[block] >= 2 for block in move.left)
    ]  # fmt: skip
    if not moves or most < least:
        return 0.0, None
    plan = Plan(layout, own, moves, near)
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
    return best_gain, target


def choose_span(
    layout: Layout, spans: Collection[Span], *, num_before: int = 0, closed: Collection[Block] = ()
) -> Span | None:
    """The span that a newcomer should serve: the one with which the pipeline is fastest. Of several such it is the one
    after which a path lacks the fewest peers (of several such the next path, and so on), then the one that leaves the
    fewest blocks as weak as the weakest, then the one with the weakest block (of several equally weak ones, with the
    fewest peers), then the shortest.

    Args:
        spans: those for which the newcomer has room.
        num_before: how many other newcomers choose first by the same rule. All newcomers count as usual peers, with
            room for the same spans.
        closed: blocks that cannot be entered.

    Returns:
        None if no span can be entered.
    """
    paths = layout.open_paths(closed)
    layout = layout.within(paths)
    throughput, num_workers = dict(layout.throughput), dict(layout.num_workers)
    spans = [span for span in spans if not set(closed) & set(span)]

    def merit(span: Span) -> tuple[float, Sequence[tuple[int, float]], int, int, int]:
        rate = layout.usual_speed / layout.cost(span)
        after = [throughput[block] + rate * (block in span) for block in throughput]
        lowest = min(after)
        neediest = min(map(by_need.index, span))
        return lowest, lacks(empty - {*span}), -sum(one <= lowest * MORE for one in after), -neediest, -len(span)

    @functools.cache
    def lacks(empty: frozenset[Block]) -> Sequence[tuple[int, float]]:
        """How many peers each path lacks, the more the smaller, of which the path that lacks the fewest comes first."""
        each = [(-len(empty.intersection(path)), layout.paths[path]) for path in paths]
        return sorted(each, reverse=True) if empty else ()

    choice = None
    for _ in range(num_before + 1):
        by_need = sorted(throughput, key=lambda block: (throughput[block], num_workers[block], block))
        empty = frozenset(block for block, number in num_workers.items() if not number)
        choice = max(spans, key=merit, default=None)
        for block in choice or ():
            throughput[block] += layout.usual_speed / layout.cost(choice or ())
            num_workers[block] += 1
    return choice


def _own_moves(layout: Layout, own: Worker, measured: Mapping[Block, float], spans: Collection[Span]) -> list[Move]:
    speed = layout.speed(own)
    # Of the blocks where it is, what it announces is newer than what it measured before.
    elsewhere = {block: rate for block, rate in measured.items() if rate > 0 and block not in own.span}
    seconds = {block: work / speed for block, work in layout.work.items()}
    seconds |= {block: layout.shares[block] / rate for block, rate in elsewhere.items()}
    loses = speed / layout.cost(own.span)
    gains = {span: 1 / sum(seconds[block] for block in span) for span in spans if span != own.span}
    return [Move.of(own.span, span, loses=loses, gains=gain) for span, gain in gains.items()]


def _best_balance(layout: Layout, own: Worker, moves: Sequence[Move]) -> float:
    """The throughput that the weakest block would have if all work were spread perfectly."""
    fastest = max((move.gains * layout.cost(move.after) for move in moves), default=0.0)
    own_speed = layout.speed(own)
    return (layout.total_speed - own_speed + max(own_speed, fastest)) / layout.cost(layout.counting)


def _margin(layout: Layout, policy: Policy, span: Span, target: Block) -> float:
    """The gain that a move from a span has to bring to a block: by the figures of the block and of the span, but no
    more than if all figures of the weakest block were off alike."""
    margins = []
    for block in [one for one in span if one != target] or [target]:
        root = math.sqrt(layout.squares[block] + layout.squares[target])
        num_peers = layout.num_workers[block] + layout.num_workers[target]
        margins.append(root * min(policy.hysteresis, policy.enough / math.sqrt(max(1, num_peers))))
    return min(max(margins), policy.hysteresis * layout.pipeline_throughput)
