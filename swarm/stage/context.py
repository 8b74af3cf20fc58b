"""The context of one stage peer's parts, and its limits. The program makes it before any of these parts."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.config import RunConfig
from swarm.events.kinds import Events
from swarm.hop.hop import Hop
from swarm.machine.clock import Clock, spawn
from swarm.stage.backend import StageBackend
from swarm.stage.runtime import Runtime

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """How much a stage peer takes on, and how long it waits for others."""

    max_in_flight: int
    """Microbatches admitted at once. There are more, up to `largest_in_flight`, if that many do not keep the peer
    busy."""
    largest_in_flight: int = 0
    """The most microbatches admitted at once; or `max_in_flight`, if that is larger."""
    orphan_seconds: float = 2.5
    """The least time that an answer that lost its call waits for a retry before it is rolled back. Inner steps, and so
    the round, wait that long too. A later retry is computed again."""
    round_wait_seconds: float = 30.0
    """How long a microbatch of the next round waits for this peer to commit the current one."""


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The things that all parts of one stage peer are given.

    Attributes:
        hop: the hop to the next stage; None at the last stage.
        tasks: the group of all tasks that outlive the call that asked for them.
    """

    config: RunConfig
    backend: StageBackend
    runtime: Runtime
    hop: Hop | None
    clock: Clock
    tasks: asyncio.TaskGroup
    limits: StageLimits
    events: Events = field(default_factory=Events)

    @property
    def stage(self) -> int:
        """The stage's number."""
        return self.backend.stage

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task that outlives the call that asked for it. Raises NotReady if this peer has stopped."""
        return spawn(self.tasks, work)
