"""What trainers tell a new leader that its predecessor has granted them, and how much of that it believes.

Used by leases alone, while a leader gathers. No trainer can prove what a leader that died has granted, and honest
trainers would have their work done twice if they were not believed. So each bearer is believed, up to its share of the
round. That is less than a whole round in any case, and those that claim less come first.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from swarm.pipeline.trainers import Trainer


@dataclass(frozen=True)
class _Claim:
    holding: frozenset[int]
    acknowledged: frozenset[int]

    @property
    def size(self) -> int:
        return len(self.holding | self.acknowledged)


class LeaseClaims:
    """The claims of a synchronous round, while they are gathered."""

    def __init__(self, round_number: int, size: int) -> None:
        """
        Args:
            size: microbatches of a round.
        """
        self.round = round_number
        self._size = size
        self._ids = range(round_number * size, (round_number + 1) * size)
        self._claims: dict[Trainer, _Claim] = {}

    def note(self, trainer: Trainer, holding: Collection[int], acknowledged: Collection[int]) -> None:
        """What a trainer says now, in the place of what it said before.

        All trainers of one bearer together can claim no more than the round: what goes beyond is left out.
        """
        claim = _Claim(*(frozenset(m for m in told if m in self._ids) for told in (holding, acknowledged)))
        others = sum(c.size for other, c in self._claims.items() if other.bearer == trainer.bearer and other != trainer)
        if claim.size and others + claim.size <= self._size:
            self._claims[trainer] = claim
        else:
            self._claims.pop(trainer, None)

    def believed(self, known: Collection[int]) -> Iterator[tuple[Trainer, int, bool]]:
        """What is believed: a trainer, a microbatch, and whether it still works on it; else it has acknowledged it.

        Args:
            known: microbatches of which no trainer's word is needed.
        """
        by_bearer = Counter[str]()
        for trainer, claim in self._claims.items():
            by_bearer[trainer.bearer] += claim.size
        # No trainer is believed to hold a whole round: one that is about to come would have nothing.
        left = dict.fromkeys(by_bearer, math.ceil(self._size / max(2, len(by_bearer))))
        taken = set(known)
        for trainer, claim in sorted(self._claims.items(), key=lambda item: (by_bearer[item[0].bearer], item[0])):
            for microbatch in sorted(claim.holding | claim.acknowledged):
                if left[trainer.bearer] > 0 and microbatch not in taken:
                    left[trainer.bearer] -= 1
                    taken.add(microbatch)
                    yield trainer, microbatch, microbatch in claim.holding
