"""LOOP 1: a trainer feeds microbatches into the swarm and follows its steps.

    lease -> tokens -> hop to stage 0 -> loss -> ack

The trainer holds no parameters. Wired together by peers/trainer; everything it needs comes in as arguments.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.errors import Fatal, RetriesExhausted, StaleMicrobatch
from swarm.events.kinds import Ack, Events, NoEvents
from swarm.hop.answers import HopListener, HopReply
from swarm.hop.hop import Hop
from swarm.machine.clock import Clock
from swarm.pipeline.lease_service import MAX_NAMED, LeaseClient, Leased
from swarm.pipeline.leases import LEASE_SECONDS
from swarm.pipeline.round_watcher import RoundWatcher, StepReport
from swarm.pipeline.window import Window
from swarm.training.microbatch import Microbatch
from swarm.types import PeerId

logger = logging.getLogger(__name__)

RENEW_SECONDS = 0.5
"""Leases are renewed at least this often: a new leader learns so what is held, before it grants anything."""
HOLD_SECONDS = LEASE_SECONDS - 1.0
"""Without a renewal, nothing is acknowledged any more after this long: another trainer may soon run it."""
GRANT_WAIT_SECONDS = 0.25
"""How long stage 0 may look for more to grant before it answers that there is none."""
LOST_GAP_SECONDS = 0.05
"""Least time between two questions to a later stage about what it has lost."""
ROUND_WAIT_SECONDS = 1.0
"""Likewise, how long a stage may wait for its next round."""
REPORT_POLLS = 10
"""Times that a committed round's figures are asked for again."""
MAX_FAILURES = 20
"""Microbatches that may fail one after another before the trainer gives up."""


@dataclass
class StepTotals:
    """What one trainer has seen since the last step.

    Attributes:
        losses: of the microbatches that were admitted to the step's round.
    """

    losses: list[float] = field(default_factory=list)
    busy_seconds: float = 0.0
    """Seconds in which microbatches were under way."""
    num_tokens: int = 0
    num_microbatches: int = 0
    num_rerouted: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the swarm, as this trainer saw it."""

    number: int
    """Steps of the run so far: the committed round plus one."""
    seconds: float
    totals: StepTotals
    report: StepReport | None


@dataclass
class _Work:
    microbatch: Microbatch
    granted_by: int
    answered: bool = False
    """Its ack may be under way: nobody else may run it, since it may count, but its place in the window is free."""


class TrainLoop(HopListener):
    """Runs microbatches and follows the swarm's steps."""

    def __init__(
        self, *, config: RunConfig, data: Microbatches, hop: Hop, leases: LeaseClient, watcher: RoundWatcher,
        clock: Clock, max_in_flight: int, on_waiting: Callable[[int], None], events: Events | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._data = data
        self._hop = hop
        self._leases = leases
        self._watcher = watcher
        self._clock = clock
        self._on_waiting = on_waiting
        self._events = events or NoEvents()
        self._window = Window(start=2 * config.stages.num_stages, largest=max_in_flight)
        self._queue: deque[_Work] = deque()
        self._in_flight: dict[int, tuple[_Work, asyncio.Task[None]]] = {}
        self._released: dict[int, list[int]] = {stage: [] for stage in range(config.stages.num_stages)}
        """By the stage whose leader granted them."""
        self._acknowledged: deque[tuple[float, int]] = deque(maxlen=MAX_NAMED)
        """Of late, for later stages: when, and which microbatch."""
        self._stage_0: Leased | None = None
        """Its last answer."""
        self._wanted = asyncio.Event()
        self._arrived = asyncio.Event()
        self._totals = StepTotals()
        self._losses: dict[int, dict[int, float]] = {}
        """By round and microbatch: one that is run again, since a peer died with it, has one loss all the same."""
        self._routes: dict[int, Mapping[int, PeerId]] = {}
        """Synchronous: who worked on each microbatch of the round, for its replays."""
        self._counted_until = clock.monotonic()
        self._paused = False
        self._num_failures = 0
        self._renewed_at = clock.monotonic()

    @property
    def num_in_flight(self) -> int:
        """Microbatches that wait for an answer.

        One that is answered, and only its ack under way, is not counted: over a long line that is a whole round trip.
        """
        return sum(not work.answered for work, _ in self._in_flight.values())

    async def run(self, first: int, count: int, on_step: Callable[[Step], Awaitable[None]]) -> None:
        """Train until the swarm has committed rounds `first` to `first + count - 1`; `on_step` hears of each.

        Raises:
            ExceptionGroup of Fatal: microbatch after microbatch failed, and why.
        Cancellation stops at once; what was in flight is rolled back by the peers, leases are given back.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                last_round = first + count - 1
                later = range(1, self._config.stages.num_stages if self._config.rounds.synchronous else 1)
                background = [
                    tasks.create_task(self._keep_leased(last_round)),
                    *(tasks.create_task(self._replay_lost(stage, last_round)) for stage in later),
                    tasks.create_task(self._dispatch(tasks)),
                ]
                await self._follow(first, count, on_step)
                for task in [*background, *(task for _, task in self._in_flight.values())]:
                    task.cancel()
        finally:
            await self._give_back()

    async def _follow(self, first: int, count: int, on_step: Callable[[Step], Awaitable[None]]) -> None:
        started_at = self._clock.monotonic()
        for number in range(first, first + count):
            while self._watcher.round <= number:
                await self._clock.sleep(0.1)
                await self._watcher.poll(ROUND_WAIT_SECONDS)
            now = self._clock.monotonic()
            # A peer is in the next round a moment before it has the figures of the last one.
            for _ in range(REPORT_POLLS):
                if self._watcher.report(number) is not None:
                    break
                await self._clock.sleep(0.1)
                await self._watcher.poll()
            self._count_busy()
            totals, self._totals = self._totals, StepTotals()
            # By round, not by time: the next round may be under way already.
            for round_number in [known for known in self._losses if known <= number]:
                totals.losses += self._losses.pop(round_number).values()
            first_known = (number + 1) * self._config.microbatches_per_round
            self._routes = {index: route for index, route in self._routes.items() if index >= first_known}
            report = self._watcher.report(number)
            await on_step(Step(number=number + 1, seconds=now - started_at, totals=totals, report=report))
            started_at = now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hand out no microbatch inside the block; what is in flight goes on.

        Synchronous: what was leased and has not begun is given back, since the others would wait for it.
        """
        self._paused = True
        if self._config.rounds.synchronous:
            self._give_up_queue()
        try:
            yield
        finally:
            self._paused = False
            self._arrived.set()

    def progress(self, stage: int, *, no_peer: bool) -> None:
        if no_peer:
            self._on_waiting(stage)

    # -- microbatches --------------------------------------------------------------------------------------------------

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            while (work := self._next()) is not None:
                self._queue.remove(work)
                task = tasks.create_task(self._train(work))
                self._count_busy()
                self._in_flight[work.microbatch.index] = (work, task)
                task.add_done_callback(functools.partial(self._ended, work))
            if self._room() > 0:
                self._wanted.set()
            self._arrived.clear()
            await self._arrived.wait()

    def _next(self) -> _Work | None:
        """What begins now, if anything does.

        What two stages have lost is run for one after the other: the second time, most of it is known.
        """
        if self._paused:
            return None
        waiting = (work for work in self._queue if work.microbatch.index not in self._in_flight)
        # All that waits is mostly of one round: what is in flight is counted once for each.
        has_room = functools.cache(self._has_room)
        return next((work for work in waiting if has_room(work.microbatch.round)), None)

    def _has_room(self, round_number: int) -> bool:
        """Whether one more of that round may be under way.

        Those of a later round do not count: they may be waiting for just this one.
        """
        under_way = (work for work, _ in self._in_flight.values() if not work.answered)
        return sum(work.microbatch.round <= round_number for work in under_way) < self._window.size

    async def _train(self, work: _Work) -> None:
        index = work.microbatch.index
        try:
            tokens = torch.from_numpy(self._data.tokens(index))
            hints = work.microbatch.known_by(self._routes.get(index, {}))
            reply = await self._hop.train(work.microbatch, {"tokens": tokens}, self, hints)
            if self._is_overdue():
                # As after a SIGSTOP: by now another trainer may have it.
                reply.close()
                self._release(work)
                return
            # All before the ack: the round cannot commit, and its step be reported, without this microbatch, and
            # somebody else can have its place.
            self._window.finished(num_busy=reply.num_busy, in_flight=self.num_in_flight)
            self._num_failures = 0
            work.answered = True
            self._arrived.set()
            self._answered(work.microbatch, reply)
            if self._config.rounds.synchronous:
                self._routes[index] = reply.route
            self._events.write(Ack(microbatch=index))
            self._note_acknowledged(work.microbatch)
            await reply.ack()
        except StaleMicrobatch as error:
            logger.debug("microbatch %d: %s", index, error)
            self._note_acknowledged(work.microbatch)  # By whoever ran it.
        except Fatal as error:
            self._failed(work, error)

    def _note_acknowledged(self, microbatch: Microbatch) -> None:
        # With DiLoCo nobody asks: each microbatch is granted once.
        if self._config.rounds.synchronous and not microbatch.is_replay:
            self._acknowledged.append((self._clock.monotonic(), microbatch.index))

    def _ended(self, work: _Work, task: asyncio.Task[None]) -> None:
        # Not in `_train`: a task that is cancelled before its first step never gets there.
        if task.cancelled() and not work.answered:
            self._release(work)
        self._count_busy()
        self._in_flight.pop(work.microbatch.index, None)
        self._arrived.set()

    def _answered(self, microbatch: Microbatch, reply: HopReply) -> None:
        is_late = microbatch.round < self._watcher.round
        if microbatch.is_replay or (is_late and self._config.rounds.synchronous):
            return  # A replay: its loss has been counted before.
        # With DiLoCo it counts for whichever round is under way: rounds may be shorter than a microbatch's way.
        losses = self._losses.setdefault(max(microbatch.round, self._watcher.round), {})
        if microbatch.index in losses:
            return
        losses[microbatch.index] = reply.loss
        self._totals.num_tokens += reply.num_tokens
        self._totals.num_microbatches += 1
        self._totals.num_rerouted += reply.num_reroutes > 0

    def _count_busy(self) -> None:
        """Before anything changes: was the time since the last change spent with microbatches under way?"""
        now = self._clock.monotonic()
        if self._in_flight:
            self._totals.busy_seconds += now - self._counted_until
        self._counted_until = now

    def _failed(self, work: _Work, error: Fatal) -> None:
        self._release(work)
        self._num_failures += 1
        logger.warning("microbatch %d failed: %s", work.microbatch.index, error)
        if self._num_failures >= MAX_FAILURES:
            raise RetriesExhausted(f"{self._num_failures} microbatches failed one after another; the last: {error}")

    # -- leases --------------------------------------------------------------------------------------------------------

    async def _keep_leased(self, last_round: int) -> None:
        while True:
            if self._is_overdue():
                self._let_go()
            asked_at = self._clock.monotonic()
            if await self._acquire(last_round):
                self._renewed_at = asked_at
            self._wanted.clear()
            if self._room() > 0:
                # More is wanted: stage 0 answers as soon as there is some.
                await self._clock.sleep(0.02)
                continue
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def _acquire(self, last_round: int) -> bool:
        """Renew what stage 0 granted, and ask it for more. True if it answered."""
        room = self._room()
        leased = await self._ask(0, room, wait_seconds=GRANT_WAIT_SECONDS if room else 0.0)
        if leased is None:
            if not self._queue and not self._in_flight:
                self._on_waiting(0)
            return False
        self._stage_0 = leased
        self._take(leased, last_round)
        return True

    def _room(self) -> int:
        """How many microbatches are wanted: for the window, and half as many for the time that a question takes.

        That is less than a microbatch's way through the stages. What more waits here, no other trainer could run. Work
        of a later round than stage 0 is in does not count: it waits for a stage 0 that came back from a checkpoint.
        """
        if self._paused:
            return 0
        newest = math.inf if self._stage_0 is None else self._stage_0.round
        num_held = sum(work.microbatch.round <= newest for work in self._work() if not work.answered)
        return max(0, self._window.size + math.ceil(self._window.size / 2) - num_held)

    async def _replay_lost(self, stage: int, last_round: int) -> None:
        """Synchronous: run again what a later stage has lost with a peer that died, while the round goes on."""
        while True:
            if self._stage_0 is not None:
                num_held = sum(work.granted_by == stage for work in self._work() if not work.answered)
                room = 0 if self._paused else max(0, self._window.size - num_held)
                lost = await self._ask(stage, room, wait_seconds=GRANT_WAIT_SECONDS, stage_0=self._stage_0)
                if lost is not None:
                    self._take(lost, last_round)
            await self._clock.sleep(LOST_GAP_SECONDS)

    async def _ask(self, stage: int, count: int, wait_seconds: float, stage_0: Leased | None = None) -> Leased | None:
        holding = [work.microbatch.index for work in self._work() if work.granted_by == stage]
        released, self._released[stage] = self._released[stage], []
        # For so long, since another peer may just take the lead.
        while self._acknowledged and self._clock.monotonic() - self._acknowledged[0][0] > LEASE_SECONDS:
            self._acknowledged.popleft()
        leased = await self._leases.acquire(
            stage, count, holding=holding, released=released, wait_seconds=wait_seconds,
            acknowledged=[microbatch for _, microbatch in self._acknowledged], newest=stage_0,
        )  # fmt: skip
        if leased is None:
            self._released[stage] += released
        return leased

    def _work(self) -> list[_Work]:
        return [*self._queue, *(work for work, _ in self._in_flight.values())]

    def _release(self, work: _Work) -> None:
        self._released[work.granted_by].append(work.microbatch.index)

    def _take(self, leased: Leased, last_round: int) -> None:
        self._drop_needless(leased)
        # While this pauses the others would wait for what was asked for before.
        if self._config.rounds.synchronous and (self._paused or leased.round > last_round):
            self._released[leased.stage] += leased.microbatches
            return
        known = {work.microbatch.index for work in self._work() if work.granted_by == leased.stage}
        new = [
            _Work(
                Microbatch(
                    index=index, round=leased.round, num_samples=self._config.data.microbatch_size,
                    accumulate_only_at=leased.accumulate_only_at,
                ),
                leased.stage,
            )
            for index in leased.microbatches
            if index not in known
        ]  # fmt: skip
        # What a stage has lost comes before the next round, which waits for it, and before the rest of this one.
        is_first = leased.accumulate_only_at is not None
        self._queue = deque([*new, *self._queue] if is_first else [*self._queue, *new])
        self._arrived.set()

    def _drop_needless(self, leased: Leased) -> None:
        self._queue = deque(work for work in self._queue if not self._is_needless(work, leased))
        for work, task in self._in_flight.values():
            # What is new answers sooner than it is given up, and an ack under way had better arrive.
            if work.microbatch.is_replay and not work.answered and self._is_needless(work, leased):
                task.cancel()

    def _is_needless(self, work: _Work, leased: Leased) -> bool:
        """Whether its stage has it: another trainer ran it, or who had it is back, or the round is over."""
        is_over = self._config.rounds.synchronous and work.microbatch.round < leased.round
        return work.granted_by == leased.stage and (is_over or work.microbatch.index in leased.counted)

    def _is_overdue(self) -> bool:
        return self._clock.monotonic() - self._renewed_at > HOLD_SECONDS

    def _let_go(self) -> None:
        """Leases could not be renewed: by the time another trainer has them, nothing of ours may still count."""
        if self._in_flight:
            logger.warning("the leases were not renewed in time: %d microbatches given up", len(self._in_flight))
        self._give_up_queue()
        for _, task in self._in_flight.values():
            task.cancel()

    def _give_up_queue(self) -> None:
        for work in self._queue:
            self._release(work)
        self._queue.clear()

    async def _give_back(self) -> None:
        """Release what was leased and not run, so that others need not wait for it to expire."""
        for work in self._work():
            self._release(work)
        self._queue.clear()
        self._in_flight.clear()
        stages = [stage for stage, released in self._released.items() if released]
        await asyncio.gather(*(self._ask(stage, 0, wait_seconds=0.0) for stage in stages))
