"""When a round has all it needs.

Used by averaging/averager, to know when to try, and by its leader, once the members have closed. Pure but for
the view of the other stages that it is given.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.types import PeerRecord, PeerState


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One stage's rule.

    Attributes:
        peers: the directory's last known view of a stage.
        is_awaited: whether another stage has waited at its barrier for long, for this one to decide a round.
    """

    config: RunConfig
    stage: int
    peers: Callable[[int], Sequence[PeerRecord]]
    is_awaited: Callable[[int], bool] = lambda round_number: False

    def __call__(
        self, round_number: int, committed: Collection[int], num_samples: int, absent_samples: int = 0
    ) -> bool:  # fmt: skip
        """Whether the group holds everything the round needs.

        Synchronous: all its microbatches. DiLoCo: its number of samples; but a stage that lost some with a
        peer ends its round early when another stage is at a later one, or it would stay behind for good. One that
        shares a block with it cannot be: it waits, and after a round's worth of samples lets none through any more.

        With DiLoCo a round that has its samples is not committed while members that are left out hold more of it than
        the others, and one that ends early ends with everybody: else a newcomer with one inner step would commit a
        round in place of the member that has nearly all of it.

        Args:
            num_samples: of those who would commit it.
            absent_samples: of the round, at living members that would be left out.
        """
        if self.config.rounds.synchronous:
            size = self.config.microbatches_per_round
            return all(index in committed for index in range(round_number * size, (round_number + 1) * size))
        if num_samples >= self.config.rounds.round_samples:
            return num_samples >= absent_samples
        if absent_samples > 0:
            return False
        return num_samples > 0 and (self._latest_elsewhere() > round_number or self.is_awaited(round_number))

    def _latest_elsewhere(self) -> int:
        others = (stage for stage in range(self.config.stages.num_stages) if stage != self.stage)
        return max((r.round for stage in others for r in self.peers(stage) if r.state is PeerState.SERVING), default=0)
