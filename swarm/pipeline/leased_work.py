"""The microbatches that a trainer has leased: those that wait, those that are under way, and their leases.

Used by the trainer's loop, which runs them. Asks the leaders for as many as the window has room for, renews what it
holds, and gives up what it could not renew. Never runs anything itself.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.hop.obstacle import OnWaiting
from swarm.machine.clock import Clock
from swarm.machine.words import counted
from swarm.pipeline.lease_service import MAX_NAMED, LeaseClient, Leased
from swarm.pipeline.leases import LEASE_SECONDS
from swarm.pipeline.window import Window
from swarm.training.microbatch import Microbatch

logger = logging.getLogger(__name__)

RENEW_SECONDS = 0.5
"""Leases are renewed at least this often: a new leader learns so what is held, before it grants anything."""
HOLD_SECONDS = LEASE_SECONDS - 1.0
"""Nothing is acknowledged any more after so long without a renewal: another trainer may soon run it."""
GRANT_WAIT_SECONDS = 0.25
"""How long a stage may look for more to grant before it answers that there is none."""
GAP_SECONDS = 0.02
"""Least time between two questions to stage 0 for more."""
LOST_GAP_SECONDS = 0.05
"""Least time between two questions to a later stage about what it has lost."""


@dataclass
class Work:
    """A microbatch that was granted."""

    microbatch: Microbatch
    granted_by: int
    """The stage whose leader granted it."""
    answered: bool = False
    """Whether it was answered. Its ack may be under way, so no other trainer may run it, but its place in the window is
    free."""


class LeasedWork:
    """What a trainer holds."""

    def __init__(
        self,
        *,
        config: RunConfig,
        leases: LeaseClient,
        clock: Clock,
        max_in_flight: int,
        on_waiting: OnWaiting,
    ) -> None:
        """
        Args:
            on_waiting: hears that stage 0 grants nothing while there is nothing to do.
        """
        self._config = config
        self._leases = leases
        self._clock = clock
        self._on_waiting = on_waiting
        self._window = Window(start=2 * config.stages.num_stages, largest=max_in_flight)
        self._queue: deque[Work] = deque()
        self._in_flight: dict[int, tuple[Work, asyncio.Task[None]]] = {}
        self._released: dict[int, list[int]] = {stage: [] for stage in range(config.stages.num_stages)}
        """By the stage whose leader granted them."""
        self._acknowledged: deque[tuple[float, int]] = deque(maxlen=MAX_NAMED)
        """The latest acknowledged microbatches, for later stages: when each was, and which it is."""
        self._stage_0: Leased | None = None
        """The last answer of stage 0."""
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_paused = False
        self._renewed_at = clock.monotonic()

    @property
    def num_in_flight(self) -> int:
        """Microbatches that wait for an answer.

        One that is answered, and only its ack under way, is not counted: over a long line that is a whole round trip.
        """
        return sum(not work.answered for work, _ in self._in_flight.values())

    @property
    def is_under_way(self) -> bool:
        """Whether anything is, were it only an ack."""
        return bool(self._in_flight)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs the microbatches that are under way."""
        return [task for _, task in self._in_flight.values()]

    @property
    def is_overdue(self) -> bool:
        """Whether the leases were not renewed for so long that another trainer may have them."""
        return self._clock.monotonic() - self._renewed_at > HOLD_SECONDS

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing begins inside the block; what is in flight goes on.

        Synchronous: what was leased and has not begun is given back, since the others would wait for it.
        """
        self._is_paused = True
        if self._config.rounds.synchronous:
            self._give_up_queue()
        try:
            yield
        finally:
            self._is_paused = False
            self._changed.set()

    # -- running it ----------------------------------------------------------------------------------------------------

    def next(self) -> Work | None:
        """Take out what begins now, if anything does.

        What two stages have lost is run for one after the other: the second time, most of it is known.
        """
        if self._is_paused:
            return None
        waiting = (work for work in self._queue if work.microbatch.index not in self._in_flight)
        # All that waits is mostly of one round: what is in flight is counted once for each.
        has_room = functools.cache(self._has_room)
        work = next((work for work in waiting if has_room(work.microbatch.round)), None)
        if work is not None:
            self._queue.remove(work)
        return work

    def _has_room(self, round_number: int) -> bool:
        """Whether one more of that round may be under way.

        Those of a later round do not count: they may be waiting for just this one.
        """
        under_way = (work for work, _ in self._in_flight.values() if not work.answered)
        return sum(work.microbatch.round <= round_number for work in under_way) < self._window.size

    def begun(self, work: Work, task: asyncio.Task[None]) -> None:
        """A task runs it."""
        self._in_flight[work.microbatch.index] = (work, task)

    def answered(self, work: Work, *, num_busy: int) -> None:
        """The microbatch came back, and is about to be acknowledged: something else may have its place."""
        self._window.finished(num_busy=num_busy, in_flight=self.num_in_flight)
        work.answered = True
        self._changed.set()
        self.note_acknowledged(work.microbatch)

    def note_acknowledged(self, microbatch: Microbatch) -> None:
        """Stage 0 counts it, or is about to, whichever trainer ran it. The leaders of later stages are told."""
        # With DiLoCo no leader asks: each microbatch is granted once.
        if self._config.rounds.synchronous and not microbatch.is_replay:
            self._acknowledged.append((self._clock.monotonic(), microbatch.index))

    def release(self, work: Work) -> None:
        """The microbatch was not run: tell the leader that granted it."""
        self._released[work.granted_by].append(work.microbatch.index)

    def ended(self, work: Work) -> None:
        """The microbatch's task has ended."""
        self._in_flight.pop(work.microbatch.index, None)
        self._changed.set()

    async def changed(self) -> None:
        """Wait until something else may begin; if there is room for it, ask for more meanwhile."""
        if self._room() > 0:
            self._wanted.set()
        self._changed.clear()
        await self._changed.wait()

    # -- leasing it ----------------------------------------------------------------------------------------------------

    async def keep_leased(self, last_round: int) -> None:
        """Renew what stage 0 granted, and ask it for more, up to a round. Runs until it is cancelled."""
        while True:
            if self.is_overdue:
                self.let_go()
            asked_at = self._clock.monotonic()
            if await self._acquire(last_round):
                self._renewed_at = asked_at
            self._wanted.clear()
            if self._room() > 0:
                # More is wanted: stage 0 answers as soon as there is some.
                await self._clock.sleep(GAP_SECONDS)
                continue
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def replay_lost(self, stage: int, last_round: int) -> None:
        """Synchronous: take what a later stage has lost with a peer that died. Runs until it is cancelled."""
        while True:
            if self._stage_0 is not None:
                num_held = sum(work.granted_by == stage for work in self._held() if not work.answered)
                room = 0 if self._is_paused else max(0, self._window.size - num_held)
                lost = await self._ask(stage, room, wait_seconds=GRANT_WAIT_SECONDS, stage_0=self._stage_0)
                if lost is not None:
                    self._take(lost, last_round)
            await self._clock.sleep(LOST_GAP_SECONDS)

    async def give_back(self) -> None:
        """Release what was leased and not run, so that others need not wait for it to expire."""
        for work in self._held():
            self.release(work)
        self._queue.clear()
        self._in_flight.clear()
        stages = [stage for stage, released in self._released.items() if released]
        await asyncio.gather(*(self._ask(stage, 0, wait_seconds=0.0) for stage in stages))

    def let_go(self) -> None:
        """Leases could not be renewed: by the time another trainer has them, nothing of ours may still count."""
        if self._in_flight:
            logger.warning(
                "the leases were not renewed in time: %s given up",
                counted(len(self._in_flight), "microbatch"),
            )
        self._give_up_queue()
        for task in self.tasks:
            task.cancel()

    async def _acquire(self, last_round: int) -> bool:
        """Renew what stage 0 granted, and ask it for more. True if it answered."""
        room = self._room()
        leased = await self._ask(0, room, wait_seconds=GRANT_WAIT_SECONDS if room else 0.0)
        if leased is None:
            if not self._queue and not self._in_flight:
                self._on_waiting(0, self._leases.obstacle(0))
            return False
        self._stage_0 = leased
        self._take(leased, last_round)
        return True

    def _room(self) -> int:
        """How many microbatches are wanted: for the window, and half as many for the time that a question takes.

        That is less than a microbatch's way through the stages. What more waits here, no other trainer could run. Work
        of a later round than stage 0 is in does not count: it waits for a stage 0 that came back from a checkpoint.
        """
        if self._is_paused:
            return 0
        newest = math.inf if self._stage_0 is None else self._stage_0.round
        num_held = sum(work.microbatch.round <= newest for work in self._held() if not work.answered)
        return max(0, self._window.size + math.ceil(self._window.size / 2) - num_held)

    async def _ask(self, stage: int, count: int, wait_seconds: float, stage_0: Leased | None = None) -> Leased | None:
        holding = [work.microbatch.index for work in self._held() if work.granted_by == stage]
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

    def _held(self) -> list[Work]:
        return [*self._queue, *(work for work, _ in self._in_flight.values())]

    def _take(self, leased: Leased, last_round: int) -> None:
        self._drop_needless(leased)
        # While this pauses the others would wait for what was asked for before.
        if self._config.rounds.synchronous and (self._is_paused or leased.round > last_round):
            self._released[leased.stage] += leased.microbatches
            return
        known = {work.microbatch.index for work in self._held() if work.granted_by == leased.stage}
        size = self._config.data.microbatch_size
        new = [
            Work(
                Microbatch(
                    index=index, round=leased.round, num_samples=size, accumulate_only_at=leased.accumulate_only_at
                ),
                leased.stage,
            )
            for index in leased.microbatches
            if index not in known
        ]
        # What a stage has lost comes before the next round, which waits for it, and before the rest of this one.
        is_first = leased.accumulate_only_at is not None
        self._queue = deque([*new, *self._queue] if is_first else [*self._queue, *new])
        self._changed.set()

    def _drop_needless(self, leased: Leased) -> None:
        self._queue = deque(work for work in self._queue if not self._is_needless(work, leased))
        for work, task in self._in_flight.values():
            # What is new answers sooner than it is given up, and an ack under way had better arrive.
            if work.microbatch.is_replay and not work.answered and self._is_needless(work, leased):
                task.cancel()

    def _is_needless(self, work: Work, leased: Leased) -> bool:
        """Whether its stage has it, since another trainer ran it or a peer came back with it, or the round is over."""
        is_over = self._config.rounds.synchronous and work.microbatch.round < leased.round
        return work.granted_by == leased.stage and (is_over or work.microbatch.index in leased.counted)

    def _give_up_queue(self) -> None:
        for work in self._queue:
            self.release(work)
        self._queue.clear()
