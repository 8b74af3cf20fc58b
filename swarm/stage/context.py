"""What the parts of one stage peer share: what the program gives them, the round of the peer, and their records."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from swarm.config import RunConfig
from swarm.errors import MalformedMessage, NotReady
from swarm.events import Events
from swarm.hop.hop import Hop
from swarm.machine.clock import Clock, spawn
from swarm.routing.throughput import MovingAverage
from swarm.stage.backend import StageBackend
from swarm.stage.computation import Computation
from swarm.stage.ledger import Ledger
from swarm.stage.runtime import Runtime
from swarm.stage.weights import StageWeights
from swarm.types import Block

Result = TypeVar("Result")


class PresentRound:
    """The round at which the peer is. It never moves the peer: averaging does. `is_behind` says whether this peer's
    group is at a later round, whose state is on its way."""

    def __init__(self, weights: StageWeights) -> None:
        self._weights = weights
        self.is_behind = False
        self._changed = asyncio.Event()

    @property
    def number(self) -> int:
        return self._weights.round.number

    def began(self) -> None:
        """Wake all tasks that wait for a round, because the weights are at a new one."""
        self._changed.set()

    def set_behind(self, is_behind: bool) -> None:
        self.is_behind = is_behind
        self._changed.set()

    async def reach(self, number: int, seconds: float, *, unless_behind: bool = False) -> None:
        """Wait until this peer is at a round, or a later one; or, if that is wanted, until it is behind its group.
        Raises TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            while self.number < number and not (unless_behind and self.is_behind):
                self._changed.clear()
                await self._changed.wait()

    async def wait_for(self, number: int, seconds: float) -> None:
        """Wait for a round, unless it would take long. Raises NotReady if this peer is behind its group, or `seconds`
        have passed."""
        with suppress(TimeoutError):
            await self.reach(number, seconds, unless_behind=True)
        if self.number < number:
            raise NotReady(f"this peer is at round {self.number}, and will be for a while")


class Answers:
    """Answers on their way back, until their acknowledgement is passed on.

    Attributes:
        num_written: tensors of answers that are being written. Writing waits when the line is full.
        num_unacknowledged: calls that have their answer, and have not acknowledged it yet.
        num_settling: tasks that still carry out the consequences of acknowledgements. No sender waits for them.
    """

    def __init__(self) -> None:
        self.num_written = 0
        self.num_unacknowledged = 0
        self.num_settling = 0

    @property
    def are_under_way(self) -> bool:
        """Whether acknowledgements are still to come or to be carried out, so that they would be lost with this
        peer."""
        return self.num_unacknowledged > 0 or self.num_settling > 0

    @contextmanager
    def written(self, num_tensors: int) -> Iterator[None]:
        self.num_written += num_tensors
        try:
            yield
        finally:
            self.num_written -= num_tensors

    @contextmanager
    def unacknowledged(self) -> Iterator[None]:
        self.num_unacknowledged += 1
        try:
            yield
        finally:
            self.num_unacknowledged -= 1

    def settle(self, consequence: "asyncio.Task[None]") -> None:
        """Count a task that carries out an acknowledgement, until the task ends."""
        self.num_settling += 1
        consequence.add_done_callback(self._settled)

    def _settled(self, _: "asyncio.Task[None]") -> None:
        self.num_settling -= 1


@dataclass(frozen=True)
class Records:
    ledger: Ledger[Computation] = field(default_factory=Ledger)
    counters: Counter[str] = field(default_factory=Counter)
    """What has happened since the peer started, by the names that StageCounters has on the wire."""
    answers: Answers = field(default_factory=Answers)
    exchanged: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """With DiLoCo what this peer received, sent on, got back and answered of a few microbatches that count, for peers
    that check it. Their computations are not kept."""
    disproved: dict[str, str] = field(default_factory=dict)
    """The peers of the block whose answers this peer has computed again and found wrong, and what was wrong."""
    seconds_per_sample: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    """The compute thread's time for one sample, forward and backward."""


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
    """The things that all parts of one stage peer share.

    Attributes:
        config: the run's, which names it. The backend's may compute in another type.
        hops: the hops to the blocks that come next on the paths through this one; none at the last stage.
        variant: which variant of the backend's stage the peer serves.
        tasks: the group of all tasks that outlive the call that asked for them.
    """

    config: RunConfig
    backend: StageBackend
    runtime: Runtime
    hops: Mapping[Block, Hop]
    clock: Clock
    tasks: asyncio.TaskGroup
    limits: StageLimits
    records: Records = field(default_factory=Records)
    variant: int = 0

    def config_in(self, round_number: int) -> RunConfig:
        """The run's configuration with the amendments that are in force in a round."""
        return self.backend.weights.timeline.at(round_number)

    @property
    def indices(self) -> range:
        """Synchronous: the indices of the present round's microbatches, those of other paths among them."""
        present = self.backend.weights.round
        return self.config_in(present.number).indices_after(present.run_samples, self.block)

    @property
    def first_after_amendments(self) -> int | None:
        """Synchronous: the first microbatch of the present round, if rounds have not always had the same size."""
        if not self.config.rounds.synchronous:
            return None
        first = self.indices.start
        return None if first == self.backend.weights.round.number * self.config.microbatches_per_round else first

    @property
    def block(self) -> Block:
        return Block(self.stage, self.variant)

    @property
    def stage(self) -> int:
        return self.backend.stage

    @property
    def events(self) -> Events:
        return self.backend.events

    @property
    def is_held_up(self) -> bool:
        """Whether no next block takes more work now."""
        return bool(self.hops) and all(hop.is_held_up for hop in self.hops.values())

    def hop_on(self, path: int) -> Hop | None:
        """The hop to the next block on a path; None at the last stage. Raises MalformedMessage if the path does not
        lead through this block."""
        if path >= len(self.config.paths) or self.block not in (blocks := self.config.blocks_of(path)):
            raise MalformedMessage(f"path {path} does not lead through stage {self.block}")
        return None if self.backend.is_last else self.hops[blocks[self.stage + 1]]

    @cached_property
    def present_round(self) -> PresentRound:
        return PresentRound(self.backend.weights)

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task that outlives the call that asked for it. Raises NotReady if this peer has stopped."""
        return spawn(self.tasks, work)
