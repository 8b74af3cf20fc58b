"""A leader's table of leases with a clock of its own, and with shorter calls for tests."""

import itertools
import random
from collections.abc import Collection, Sequence, Set
from typing import Any

from swarm.config import RoundsConfig, RunConfig
from swarm.pipeline.leases import GATHER_SECONDS, Grant, LeaseTable, RoundView
from swarm.pipeline.trainers import Trainer
from swarm.types import Block
from tests.support.manual_clock import ManualClock

SYNCHRONOUS = RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=48))
DILOCO = RunConfig(rounds=RoundsConfig(setting="diloco", round_samples=48))
FIRST = Block(0)
SIZE = SYNCHRONOUS.microbatches_per_round


class _AskedClock(ManualClock):
    """A clock. While its time moves, a trainer keeps asking the leader."""

    def __init__(self, leader: "Leader") -> None:
        super().__init__()
        self._leader = leader

    def advance(self, seconds: float) -> None:
        while self._leader.is_asked and seconds > 0.5:
            super().advance(0.5)
            self._leader.ask("another", 0)
            seconds -= 0.5
        super().advance(seconds)


class Leader:
    """A table with a clock, and with shorter calls for tests."""

    def __init__(
        self, config: RunConfig, block: Block = FIRST, seed: int = 0, led_seconds: float = GATHER_SECONDS
    ) -> None:
        self.clock = _AskedClock(self)
        self.table = LeaseTable(config, block, self.clock, random.Random(seed))
        self.committed: set[int] = set()
        self.counted: set[int] = set()
        self.lost: set[int] = set()
        self.highest = -1
        self.round = 0
        self.is_asked = config.rounds.synchronous
        """Whether a trainer that wants nothing asks all the time, as trainers do."""
        self._config, self._block, self._paths = config, block, config.paths_through(block)
        self.clock.advance(led_seconds)

    def ask(
        self, trainer: str | Trainer, count: int, *, holding: Collection[int] = (), released: Collection[int] = (),
        quiet_seconds: float = 0.0, committed: Set[int] | None = None, all_granted: bool = True,
        all_committed: bool = True, awaits_reports: bool = False, misses_member: bool = False,
        acknowledged: Collection[int] = (), paths: Sequence[int] | None = None,
    ) -> Grant:  # fmt: skip
        """Ask for as many microbatches, of the block's paths in turns, or for those of the `paths` that are named."""
        paths = [*itertools.islice(itertools.cycle(self._paths), count)] if paths is None else paths
        view = RoundView(
            round=self.round, microbatches=self.round_of(),
            committed=self.committed if committed is None else committed, lost=self.lost,
            counted=self.counted | self.lost | self.committed, highest_microbatch=self.highest,
            quiet_seconds=quiet_seconds, awaits_reports=awaits_reports, misses_member=misses_member, complete=False,
        )  # fmt: skip
        return self.table.acquire(
            view, trainer if isinstance(trainer, Trainer) else Trainer(trainer, trainer), paths, holding=holding,
            released=released, all_granted=all_granted,
            acknowledged=acknowledged, all_committed=all_committed,
        )  # fmt: skip

    def give(self, trainer: str | Trainer, count: int, **options: Any) -> list[int]:
        return list(self.ask(trainer, count, **options).microbatches)

    def round_of(self, path: int | None = None) -> list[int]:
        """The microbatches of the round at the block, or those of one path."""
        before = self.round * self._config.round_samples_of(self._block)
        ids = self._config.microbatches_after(before, self._block)
        return [microbatch for microbatch in ids if path in (None, self._config.path_of(microbatch))]
