"""The interface of a rule, for the study `rebalancing`; and NoRule, by which no peer moves."""

import random
from typing import Protocol

from scripts.benches.simulate.fluid.swarm import FluidSwarm


class Rule(Protocol):
    """Moves the peers of one swarm."""

    def began(self, peer: int) -> None: ...

    def came(self, peer: int) -> None: ...

    def left(self, peer: int) -> None: ...


class NoRule:
    """Newcomers take any stage, and no peer moves."""

    def __init__(self, swarm: FluidSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng

    def began(self, peer: int) -> None:
        """Do nothing."""

    def came(self, peer: int) -> None:
        self._swarm.join(peer, self._rng.randrange(self._swarm.num_stages))

    def left(self, peer: int) -> None:
        """Do nothing."""
