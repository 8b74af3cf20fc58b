"""Swarms to rebalance: layouts, and the moves that their peers decide on in turn."""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from swarm.rebalancing.decision import DEFAULT, Policy, decide
from swarm.rebalancing.layout import Layout, Worker
from swarm.types import Block, PeerId


def by_block(costs: Sequence[float]) -> dict[Block, float]:
    """Costs of stages 0, 1, ..."""
    return {Block(stage): cost for stage, cost in enumerate(costs)}


def layout(*stages: Sequence[float], costs: Sequence[float] | None = None, movable: bool = True) -> Layout:
    """Peers with these speeds at each stage, which all serve; peer 2 of stage 1 is `1.2`."""
    workers = [
        Worker(peer_id=PeerId(f"{stage}.{number}"), block=Block(stage), speed=speed, movable=movable)
        for stage, speeds in enumerate(stages)
        for number, speed in enumerate(speeds)
    ]
    return Layout(workers, by_block(costs or [1.0] * len(stages)))


def moved(before: Layout, peer_id: PeerId, block: Block) -> Layout:
    """The layout after a peer's move."""
    changed = dataclasses.replace(before.workers[peer_id], block=block)
    return Layout((before.workers | {peer_id: changed}).values(), before.costs)


def with_speeds(before: Layout, speeds: Mapping[PeerId, float]) -> Layout:
    """The same peers at the same stages with other speeds."""
    workers = [dataclasses.replace(worker, speed=speeds[peer]) for peer, worker in before.workers.items()]
    return Layout(workers, before.costs)


def settle(
    now: Layout, rng: random.Random, policy: Policy = DEFAULT, *, limit: int = 10_000
) -> list[tuple[PeerId, Block, Layout]]:
    """Let peers decide one at a time, in random order, until none moves; yields each move and the layout after it."""
    moves: list[tuple[PeerId, Block, Layout]] = []
    turns: list[PeerId] = []
    num_stays = 0
    # By then every peer has had a turn after waiting, in whichever order the turns came.
    while num_stays < 3 * len(now.workers):
        if not turns:
            turns = sorted(now.workers)
            rng.shuffle(turns)
        peer_id = turns.pop()
        target = decide(now, peer_id, policy, waited=num_stays >= len(now.workers))
        if target is None:
            num_stays += 1
            continue
        num_stays = 0
        now = moved(now, peer_id, target)
        moves.append((peer_id, target, now))
        assert len(moves) <= limit, "it does not settle"
    return moves
