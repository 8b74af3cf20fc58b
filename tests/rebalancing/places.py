"""Swarms to rebalance: layouts, and the moves that their peers decide on in turn."""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from swarm.rebalancing.decision import DEFAULT, Policy, decide
from swarm.rebalancing.layout import Layout, Span, Worker
from swarm.types import Block, PeerId


def span(first: int, last: int | None = None) -> Span:
    """The blocks of stages `first` to `last`, or of one stage."""
    return tuple(map(Block, range(first, (first if last is None else last) + 1)))


def by_block(costs: Sequence[float]) -> dict[Block, float]:
    """Costs of stages 0, 1, ..."""
    return {Block(stage): cost for stage, cost in enumerate(costs)}


def layout(*stages: Sequence[float], costs: Sequence[float] | None = None, movable: bool = True) -> Layout:
    """Peers with these speeds at each stage, which all serve; peer 2 of stage 1 is `1.2`."""
    workers = [
        Worker(peer_id=PeerId(f"{stage}.{number}"), span=(Block(stage),), speed=speed, movable=movable)
        for stage, speeds in enumerate(stages)
        for number, speed in enumerate(speeds)
    ]
    return Layout(workers, by_block(costs or [1.0] * len(stages)))


def moved(before: Layout, peer_id: PeerId, span: Span) -> Layout:
    """The layout after a peer's move."""
    changed = dataclasses.replace(before.workers[peer_id], span=span)
    return Layout((before.workers | {peer_id: changed}).values(), before.costs, before.paths)


def with_speeds(before: Layout, speeds: Mapping[PeerId, float]) -> Layout:
    """The same peers at the same stages with other speeds."""
    workers = [dataclasses.replace(worker, speed=speeds[peer]) for peer, worker in before.workers.items()]
    return Layout(workers, before.costs, before.paths)


def settle(
    now: Layout, rng: random.Random, policy: Policy = DEFAULT, *, limit: int = 10_000,
    spans: Mapping[PeerId, Sequence[Span]] | None = None,
) -> list[tuple[PeerId, Span, Layout]]:  # fmt: skip
    """Let peers decide one at a time, in random order, until none moves; gives each move and the layout after it.
    `spans` are those for which each peer has room; None: all have room for any single block."""
    moves: list[tuple[PeerId, Span, Layout]] = []
    turns: list[PeerId] = []
    num_stays = 0
    # By then every peer has had a turn after waiting, in whichever order the turns came.
    while num_stays < 3 * len(now.workers):
        if not turns:
            turns = sorted(now.workers)
            rng.shuffle(turns)
        peer_id = turns.pop()
        room = None if spans is None else spans[peer_id]
        target = decide(now, peer_id, policy, spans=room, waited=num_stays >= len(now.workers))
        if target is None:
            num_stays += 1
            continue
        num_stays = 0
        now = moved(now, peer_id, target)
        moves.append((peer_id, target, now))
        assert len(moves) <= limit, "it does not settle"
    return moves
