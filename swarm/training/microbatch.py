"""The description of a microbatch that is under way: its index, its round, and the stages that count it.

A trainer makes one for each microbatch that a leader granted, and each stage makes one from the call that brings it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A microbatch's description, without its tensors."""

    index: int
    round: int
    num_samples: int
    accumulate_only_at: int | None = None
    since: float | None = None
    """When stage 0 was first asked to take it, by the event loop's clock; None at a trainer."""

    @property
    def way_seconds(self) -> float:
        """How long the microbatch has been on its way through the stages."""
        return 0.0 if self.since is None else asyncio.get_running_loop().time() - self.since

    @property
    def is_replay(self) -> bool:
        """Whether this microbatch is run again, for a stage that has lost it."""
        return self.accumulate_only_at is not None

    def counts_at(self, stage: int) -> bool:
        """Whether a stage accumulates this microbatch's gradient. In a replay, only the stage that lost it does."""
        return self.accumulate_only_at in (None, stage)

    def known_by(self, route: Mapping[int, PeerId]) -> dict[int, PeerId]:
        """The peers of a route that still know the microbatch. For a replay, the stage that lost it is left out."""
        return {stage: peer for stage, peer in route.items() if stage != self.accumulate_only_at}

    def answers_gradient(self, stage: int) -> bool:
        """Whether a stage's answer contains the gradient of its input. For a replay, only later stages' answers do."""
        return self.accumulate_only_at is None or self.accumulate_only_at < stage
