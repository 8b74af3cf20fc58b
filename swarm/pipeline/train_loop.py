"""LOOP 1: a trainer, which holds no parameters, feeds microbatches into the swarm and follows its steps.

lease -> tokens -> hop to stage 0 -> loss -> ack
"""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from swarm.config import RunConfig, Timeline
from swarm.data.microbatches import Microbatches, Texts
from swarm.errors import Fatal, PathStandsStill, RetriesExhausted, StaleMicrobatch
from swarm.events import Ack, Events
from swarm.hop.answers import HopListener, HopReply, Obstacle, OnWaiting
from swarm.hop.hop import Hop
from swarm.machine.clock import Clock
from swarm.machine.words import Repeats, counted
from swarm.pipeline.leased_work import LeasedWork, Work
from swarm.pipeline.round_watcher import RoundWatcher, StepReport
from swarm.pipeline.trainer_paths import TrainerPaths
from swarm.training import samples
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId

logger = logging.getLogger(__name__)


@dataclass
class StepTotals:
    """One trainer's figures since the last step, among them the mean loss and the number of targets of each microbatch
    that counts for the step's round."""

    losses: list[tuple[float, int]] = field(default_factory=list)
    busy_seconds: float = 0.0
    num_targets: int = 0
    num_microbatches: int = 0
    num_rerouted: int = 0

    @property
    def loss(self) -> float | None:
        """The mean over the targets; None if there are none."""
        num_targets = sum(count for _, count in self.losses)
        if not num_targets:
            return None
        # Peers may report any finite number. The exact mean of such numbers is finite, but a sum of floats may not be.
        return float(sum(Fraction(loss) * count for loss, count in self.losses) / num_targets)


class Tally:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._totals = StepTotals()
        self._losses: dict[int, dict[int, tuple[float, int]]] = {}
        """The losses by round and microbatch. A microbatch that is run again because a peer died still has one loss."""
        self._counted_until = clock.monotonic()

    def time_passed(self, *, is_busy: bool) -> None:
        """Count the time since the last call. Has to be called before a microbatch begins or ends."""
        now = self._clock.monotonic()
        if is_busy:
            self._totals.busy_seconds += now - self._counted_until
        self._counted_until = now

    def answered(self, round_number: int, microbatch: int, loss: float, *, num_targets: int, is_rerouted: bool) -> None:
        """Count a microbatch that was answered for a round, unless it has been counted for that round before."""
        losses = self._losses.setdefault(round_number, {})
        if microbatch in losses:
            return
        losses[microbatch] = loss, num_targets
        self._totals.num_targets += num_targets
        self._totals.num_microbatches += 1
        self._totals.num_rerouted += is_rerouted

    @property
    def num_microbatches(self) -> int:
        return self._totals.num_microbatches

    def take(self, round_number: int) -> StepTotals:
        """Return the totals of the step that ends with this round. Losses are divided by round, not by time, since the
        next round may be under way already."""
        totals, self._totals = self._totals, StepTotals()
        for known in [known for known in self._losses if known <= round_number]:
            totals.losses += self._losses.pop(known).values()
        return totals


ROUND_WAIT_SECONDS = 1.0
"""How long a stage may wait for its next round before it answers."""
LOOK_SECONDS = 0.1
REPORT_POLLS = 10
MAX_FAILURES = 20
"""How many microbatches may fail one after another before the trainer gives up."""


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int
    """How many steps the run has taken: the committed round plus one."""
    seconds: float
    totals: StepTotals
    report: StepReport | None


class PathListener(HopListener):
    """Tells at which block of a path microbatches wait, and why."""

    def __init__(self, blocks: Sequence[Block], on_waiting: OnWaiting) -> None:
        super().__init__()
        self._blocks, self._on_waiting = blocks, on_waiting

    def progress(self, stage: int, *, obstacle: Obstacle | None) -> None:
        # A peer may make up a stage that the run does not have.
        if obstacle is not None and stage < len(self._blocks):
            self._on_waiting(self._blocks[stage], obstacle)


class TrainLoop:
    def __init__(
        self, *, config: RunConfig, paths: TrainerPaths, texts: Texts, hops: Mapping[Block, Hop],
        work: LeasedWork, watcher: RoundWatcher, clock: Clock, on_waiting: OnWaiting, events: Events | None = None,
        timeline: Timeline | None = None,
    ) -> None:  # fmt: skip
        """`hops` lead to the blocks at which the paths begin. `timeline` has the amendments, if there can be any."""
        self._config = config
        self._timeline = timeline or Timeline(config)
        self._texts = texts
        self._paths = paths
        self._hops = hops
        self._work = work
        self._watcher = watcher
        self._clock = clock
        self._on_waiting = on_waiting
        self._events = events or Events()
        self._tally = Tally(clock)
        self._routes = defaultdict[int, dict[int, Mapping[Block, PeerId]]](dict)
        """Synchronous: which peers worked on each microbatch of a round, for its replays."""
        self._num_failures = 0
        self._repeats = Repeats(clock)

    @property
    def num_in_flight(self) -> int:
        return self._work.num_in_flight

    @property
    def num_counted(self) -> int:
        return self._tally.num_microbatches

    def paused(self) -> AbstractContextManager[None]:
        """Hand out no microbatch inside the block; see LeasedWork.paused."""
        return self._work.paused()

    def listener(self, path: int) -> PathListener:
        return PathListener(self._config.blocks_of(path), self._on_waiting)

    async def run(self, first: int, count: int, on_step: Callable[[Step], Awaitable[None]]) -> None:
        """Train until the swarm has committed rounds `first` to `first + count - 1`.

        Raises SwarmErrors in a group if microbatch after microbatch failed, or no leader serves this trainer.
        Cancellation stops at once: peers roll back what was in flight, and leases are given back.
        """
        last_round = first + count - 1
        later = [block for block in self._paths.blocks if block.stage > 0 and self._config.rounds.synchronous]
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    *(tasks.create_task(self._work.keep_leased(block, last_round)) for block in self._paths.entries),
                    *(tasks.create_task(self._work.replay_lost(block, last_round)) for block in later),
                    tasks.create_task(self._dispatch(tasks)),
                ]
                await self._follow(first, count, on_step)
                for task in [*background, *self._work.tasks]:
                    task.cancel()
        finally:
            await self._work.give_back()

    # -- following the rounds ------------------------------------------------------------------------------------------

    async def _follow(self, first: int, count: int, on_step: Callable[[Step], Awaitable[None]]) -> None:
        started_at = self._clock.monotonic()
        for number in range(first, first + count):
            while self._watcher.round <= number:
                await self._clock.sleep(LOOK_SECONDS)
                await self._watcher.poll(ROUND_WAIT_SECONDS)
            now = self._clock.monotonic()
            # A peer enters the next round a moment before it has the figures of the last one.
            for _ in range(REPORT_POLLS):
                if self._watcher.report(number) is not None:
                    break
                await self._clock.sleep(LOOK_SECONDS)
                await self._watcher.poll()
            self._count_busy()
            totals = self._tally.take(number)
            for known in [known for known in self._routes if known <= number]:
                del self._routes[known]
            report = self._watcher.report(number)
            await on_step(Step(number=number + 1, seconds=now - started_at, totals=totals, report=report))
            started_at = now

    # -- running microbatches ------------------------------------------------------------------------------------------

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            while (work := self._work.next()) is not None:
                if parts := self._awaited(work.microbatch):
                    # Others run what this trainer has no text for yet, as it may take long.
                    self._work.release(work)
                    with self._work.paused():
                        for part in parts:
                            await asyncio.wrap_future(part)
                    continue
                task = tasks.create_task(self._train(work))
                self._count_busy()
                self._work.begun(work, task)
                task.add_done_callback(functools.partial(self._ended, work))
            await self._work.changed()

    async def _train(self, work: Work) -> None:
        microbatch = work.microbatch
        try:
            batch = self._data_of(microbatch).samples(self._data_number(microbatch))
            hints = microbatch.known_by(self._routes[microbatch.round].get(microbatch.index, {}))
            entry, path = self._paths.entry_of(microbatch.index), self._config.path_of(microbatch.index)
            reply = await self._hops[entry].train(microbatch, batch, self.listener(path), hints)
            if self._work.is_overdue(entry):
                # This process may have been stopped for a while, and another trainer may have the microbatch by now.
                reply.close()
                self._work.release(work)
                return
            # Counted before the ack is sent: the ack may let the round commit, and the report of its step must include
            # this microbatch. Another microbatch can begin while the ack is under way.
            self._num_failures = 0
            self._answered(microbatch, reply, samples.amount(batch).targets)
            self._events.write(Ack(microbatch=microbatch.index))
            self._work.answered(work, num_busy=reply.num_busy)
            await reply.ack()
        except StaleMicrobatch as error:
            logger.debug("microbatch %d: %s", microbatch.index, error)
            self._work.note_acknowledged(microbatch)
        except PathStandsStill as error:
            self._paths.leave_alone(microbatch.index, str(error))
            self._work.release(work)
        except Fatal as error:
            self._failed(work, error)

    def _awaited(self, microbatch: Microbatch) -> Sequence[Future[Any]]:
        """What is to be prepared before the microbatch can be read: its text, or parts of that."""
        text = self._texts.want(self._timeline.at(microbatch.round).data)
        return self._data_of(microbatch).preparing(self._data_number(microbatch)) if text.done() else [text]

    def _data_of(self, microbatch: Microbatch) -> Microbatches:
        """The data that the microbatch's round trains on."""
        return self._texts.at(self._timeline.at(microbatch.round).data)

    def _data_number(self, microbatch: Microbatch) -> int:
        """Which of the data's microbatches this one is: in the synchronous setting that of its index.

        With DiLoCo a new leader leaves many indices out. What streams cannot be left out, because it would have to be
        read, so there the round says where in the data a microbatch is.
        """
        num = self._config.microbatches_per_round
        return microbatch.round * num + microbatch.index % num if self._config.data.part_rows else microbatch.index

    def _answered(self, microbatch: Microbatch, reply: HopReply, num_targets: int) -> None:
        if self._config.rounds.synchronous:
            self._routes[microbatch.round][microbatch.index] = reply.route
        is_late = microbatch.round < self._watcher.round
        if microbatch.is_replay or (is_late and self._config.rounds.synchronous):
            return  # Its loss has been counted already.
        # With DiLoCo a loss counts for the round under way, since a round may be shorter than a microbatch takes.
        self._tally.answered(
            max(microbatch.round, self._watcher.round), microbatch.index, reply.loss, num_targets=num_targets,
            is_rerouted=reply.num_reroutes > 0,
        )  # fmt: skip

    def _ended(self, work: Work, task: asyncio.Task[None]) -> None:
        # This is not part of `_train`, because a task that is cancelled before its first step never runs any of it.
        if task.cancelled() and not work.answered:
            self._work.release(work)
        self._count_busy()
        self._work.ended(work)

    def _count_busy(self) -> None:
        self._tally.time_passed(is_busy=bool(self._work.tasks))

    def _failed(self, work: Work, error: Fatal) -> None:
        self._work.release(work)
        self._num_failures += 1
        if num := self._repeats.count(str(error)):
            often = f", and {num - 1} before it since this was said last" if num > 1 else ""
            logger.warning("microbatch %d failed%s: %s", work.microbatch.index, often, error)
        if self._num_failures >= MAX_FAILURES:
            failed = counted(self._num_failures, "microbatch")
            raise RetriesExhausted(f"{failed} failed one after another; the last: {error}")
