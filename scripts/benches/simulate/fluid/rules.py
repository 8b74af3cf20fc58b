"""Rules for moving, for the study `rebalancing`: none, and the SWARM paper's."""

import random

from scripts.benches.simulate.fluid.swarm import FluidSwarm


class NoRule:
    """Newcomers take any stage, and no peer moves."""

    def __init__(self, swarm: FluidSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng

    def began(self, peer: int) -> None:
        """Called for a peer that is there from the start, and serves."""

    def came(self, peer: int) -> None:
        """Called for a newcomer, which has to `join` a stage."""
        self._swarm.join(peer, self._rng.randrange(self._swarm.num_stages))

    def left(self, peer: int) -> None:
        """Called when a peer has gone."""


class SwarmRule(NoRule):
    """The SWARM paper's rule (arXiv 2301.11913, appendix, Algorithm 2).

    Every T seconds the idlest peer of the stage with the least waiting work goes to the stage with the most. In a full
    pipeline nearly all work waits before the weakest stage, so stages are ordered by their throughput.
    """

    def __init__(self, swarm: FluidSwarm, rng: random.Random, *, period_seconds: float) -> None:
        super().__init__(swarm, rng)
        self._period_seconds = period_seconds
        swarm.timeline.after(period_seconds, self._tick)

    def came(self, peer: int) -> None:
        self._swarm.join(peer, self._by_load()[-1])

    def _tick(self) -> None:
        idlest, *_, busiest = self._by_load()
        peers = list(self._swarm.peers[idlest])
        if idlest != busiest and len(peers) > 1:
            # All machines are alike, so the idlest is chosen at random.
            self._swarm.move(self._rng.choice(peers), busiest)
        # The next look is planned after the move, so that the peer arrives before it even if a download takes a whole
        # period.
        self._swarm.timeline.after(self._period_seconds, self._tick)

    def _by_load(self) -> list[int]:
        """The stages, from the one with the least waiting work, which has most peers, to the one with the most."""
        counts = self._swarm.num_serving
        return sorted(range(len(counts)), key=lambda stage: (-counts[stage], self._rng.random()))
