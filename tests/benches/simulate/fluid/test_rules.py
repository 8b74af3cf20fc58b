"""Rules for moving, in small swarms of which one stage has lost peers."""

import random
from collections.abc import Callable

import pytest

from scripts.benches.simulate.fluid.own_rule import NoRule, OwnRule, SwarmRule
from scripts.benches.simulate.fluid.swarm import FluidSwarm
from scripts.benches.simulate.timeline import Timeline

MakeRule = Callable[[FluidSwarm, random.Random], NoRule]


class World:
    """Twelve peers, four at each of three stages."""

    def __init__(self, make: MakeRule) -> None:
        self.timeline = Timeline()
        self.swarm = FluidSwarm(self.timeline, 3, 30.0)
        self.rule = make(self.swarm, random.Random(5))
        for peer in range(12):
            self.swarm.start(peer, peer % 3)
            self.rule.began(peer)

    def come(self, *peers: int) -> None:
        """Peers begin to look for a stage."""
        for peer in peers:
            self.swarm.come(peer)
            self.rule.came(peer)

    def leave(self, *peers: int) -> None:
        """Peers die."""
        for peer in peers:
            self.swarm.leave(peer)
            self.rule.left(peer)


def every_five_minutes(swarm: FluidSwarm, rng: random.Random) -> SwarmRule:
    return SwarmRule(swarm, rng, period_seconds=300.0)


@pytest.mark.parametrize("make", [NoRule, every_five_minutes, OwnRule])
def test_no_rule_empties_a_stage_or_remembers_the_dead(make: MakeRule) -> None:
    """Newcomers, movers and servers that die at any moment leave nothing behind."""
    world, rng, alive = World(make), random.Random(0), list(range(12))
    for peer in range(12, 200):
        world.come(peer)
        alive.append(peer)
        while len(alive) > 12:
            world.leave(alive.pop(rng.randrange(len(alive))))
        world.timeline.run(world.timeline.monotonic() + rng.expovariate(1 / 20))
    world.timeline.run(world.timeline.monotonic() + 600.0)
    assert (len(world.swarm.present), sum(world.swarm.num_serving)) == (12, 12)
    world.leave(*alive[:8])
    for _ in range(120):
        fewest = min(world.swarm.num_serving)
        world.timeline.run(world.timeline.monotonic() + 60.0)
        assert min(world.swarm.num_serving) >= min(fewest, 1)
