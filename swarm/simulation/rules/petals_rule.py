"""Petals' rule (arXiv 2312.08361, and its server's published code).

Every peer looks now and then, at an interval drawn evenly between nothing and twice the mean. It imagines that it, and
then all others one after another, went wherever they are needed most, until nobody would go any further; if the weakest
stage would then be so much stronger than now that now is less than three quarters of it, the peer goes to the weakest
stage at once. Newcomers go there too. Never if a stage were left empty.

All machines are alike, so what everybody's moves end in is an even spread, and need not be searched for. Favoured here:
everybody sees who serves what at that moment, and who is on the way.
"""

import random

from swarm.simulation.fluid import FluidSwarm

QUALITY = 0.75
"""Of the weakest stage, now over then."""


class PetalsRule:
    """One swarm's."""

    def __init__(self, swarm: FluidSwarm, rng: random.Random, *, period_seconds: float = 60.0) -> None:
        self._swarm = swarm
        self._rng = rng
        self._period_seconds = period_seconds
        self._goes_to: dict[int, int] = {}
        """Who is on the way, and where to: announced at once."""

    def began(self, peer: int) -> None:
        """It will look."""
        self._swarm.timeline.after(self._rng.uniform(0.0, 2 * self._period_seconds), lambda: self._check(peer))

    def came(self, peer: int) -> None:
        """To the weakest stage."""
        target = self._weakest()
        self._goes_to[peer] = target
        self._swarm.join(peer, target, lambda: self._arrived(peer))

    def left(self, peer: int) -> None:
        """It is not on its way any more."""
        self._goes_to.pop(peer, None)

    def _arrived(self, peer: int) -> None:
        del self._goes_to[peer]
        self.began(peer)

    def _check(self, peer: int) -> None:
        if peer not in self._swarm.present:
            return
        counts = self._counts()
        then = sum(counts) // len(counts)
        if min(counts) >= QUALITY * then or len(self._swarm.peers[self._swarm.stage_of[peer]]) < 2:
            self.began(peer)
            return
        target = self._weakest()
        if target == self._swarm.stage_of[peer]:
            self.began(peer)
            return
        self._goes_to[peer] = target
        self._swarm.move(peer, target, lambda: self._arrived(peer))

    def _weakest(self) -> int:
        counts = self._counts()
        return min(range(len(counts)), key=counts.__getitem__)

    def _counts(self) -> list[int]:
        counts = self._swarm.num_serving
        for stage in self._goes_to.values():
            counts[stage] += 1
        return counts
