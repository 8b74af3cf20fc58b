"""A microbatch on its way: which one, of which round, and for whom.

Made by a trainer of what stage 0 granted; every stage makes its own of what came with the call.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What is known of a microbatch, its tensors apart."""

    index: int
    round: int
    num_samples: int
    accumulate_only_at: int | None = None
    since: float | None = None
    """When stage 0 was asked for it, by the event loop's clock; None at a trainer."""

    @property
    def way_seconds(self) -> float:
        """How long it has been on its way through the stages."""
        return 0.0 if self.since is None else asyncio.get_running_loop().time() - self.since

    @property
    def is_replay(self) -> bool:
        """Whether all stages but one have it."""
        return self.accumulate_only_at is not None

    def counts_at(self, stage: int) -> bool:
        """Whether a stage is to accumulate its gradient: each one, or of a replay the one that lacks it."""
        return self.accumulate_only_at in (None, stage)

    def known_by(self, route: Mapping[int, PeerId]) -> dict[int, PeerId]:
        """The peers that worked on it before and know it. Of a replay, none at the stage that lost it does."""
        return {stage: peer for stage, peer in route.items() if stage != self.accumulate_only_at}

    def answers_gradient(self, stage: int) -> bool:
        """Whether the answer of a stage has the gradient of its input: of a replay only those after the stage that
        lacks it."""
        return self.accumulate_only_at is None or self.accumulate_only_at < stage
