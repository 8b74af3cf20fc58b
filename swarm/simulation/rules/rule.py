"""What a rule is to the study `rebalancing`, and having none."""

import random
from typing import Protocol

from swarm.simulation.fluid import FluidSwarm


class Rule(Protocol):
    """Moves the peers of one swarm."""

    def began(self, peer: int) -> None:
        """A peer that was there from the start serves."""
        ...

    def came(self, peer: int) -> None:
        """A newcomer is there, and has to `join` a stage."""
        ...

    def left(self, peer: int) -> None:
        """A peer has gone."""
        ...


class NoRule:
    """Newcomers take any stage, and no peer moves."""

    def __init__(self, swarm: FluidSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng

    def began(self, peer: int) -> None:
        """Nothing follows."""

    def came(self, peer: int) -> None:
        """A stage by chance."""
        self._swarm.join(peer, self._rng.randrange(self._swarm.num_stages))

    def left(self, peer: int) -> None:
        """Nothing follows."""
