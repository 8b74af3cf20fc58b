"""The SWARM paper's rule (arXiv 2301.11913, appendix, Algorithm 2).

Every T seconds the idlest peer of the stage with the least waiting work goes to the stage with the most; newcomers go
there too. In a full pipeline all work that can wait, waits before the weakest stage, and the more another stage could
manage the less waits there: so the stages are in the order of what they manage, and equal ones in any order. Favoured
here: all peers see the queues as they are at that moment, and a stage is never left empty.
"""

import random

from swarm.simulation.fluid import FluidSwarm


class SwarmRule:
    """The SWARM paper's rule, applied to one simulated swarm."""

    def __init__(self, swarm: FluidSwarm, rng: random.Random, *, period_seconds: float) -> None:
        self._swarm = swarm
        self._rng = rng
        self._period_seconds = period_seconds
        swarm.timeline.after(period_seconds, self._tick)

    def began(self, peer: int) -> None:
        """Nothing follows."""

    def came(self, peer: int) -> None:
        """Where most work waits."""
        self._swarm.join(peer, self._by_load()[-1])

    def left(self, peer: int) -> None:
        """Nothing follows."""

    def _tick(self) -> None:
        idlest, *_, busiest = self._by_load()
        peers = list(self._swarm.peers[idlest])
        if idlest != busiest and len(peers) > 1:
            # All machines are alike: which of them is the idlest is chance.
            self._swarm.move(self._rng.choice(peers), busiest)
        # Planned now, so that the peer that has just been sent arrives before the next look even where a download takes
        # a whole period.
        self._swarm.timeline.after(self._period_seconds, self._tick)

    def _by_load(self) -> list[int]:
        """The stages, by the work that waits there: the more a stage manages, the less."""
        counts = self._swarm.num_serving
        return sorted(range(len(counts)), key=lambda stage: (-counts[stage], self._rng.random()))
