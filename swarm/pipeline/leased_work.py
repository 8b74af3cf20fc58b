"""The microbatches that a trainer has leased: those that wait, those that are under way, and their leases.

Asks the leaders for as many as the window has room for, renews the leases, and gives up microbatches whose leases it
could not renew.
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
from swarm.hop.answers import OnWaiting
from swarm.machine.clock import Clock, wait
from swarm.machine.words import counted
from swarm.pipeline.lease_service import MAX_NAMED, LeaseClient
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.training.samples import Microbatch
from swarm.types import LEASE_SECONDS, TRAINER_ACK_SECONDS, Block

logger = logging.getLogger(__name__)

RENEW_SECONDS = 0.5
"""Leases are renewed at least this often, so that a new leader learns which are held before it grants anything."""
GRANT_WAIT_SECONDS = 0.25
"""How long a stage may wait for something to grant before it answers that there is nothing."""
GAP_SECONDS = 0.02
"""Least time between two requests to stage 0 for more."""
LOST_GAP_SECONDS = 0.05
"""Least time between two requests to a later stage for microbatches that it has lost."""
_LEAST_GROWTH = 1.0
"""The growth in the round trip after a Busy. It doubles with each round trip without a Busy, as another trainer may
have left."""
_DECREASE = 0.93
"""The factor by which a Busy shrinks the window. It is near 1: Busy from one of many peers says that this peer has
enough, not that all have."""


class Window:
    """How many microbatches a trainer keeps in flight: as many as the swarm takes, so that a trainer needs to know
    neither the swarm's size nor the links. Like a TCP window it doubles in a round trip until a peer is busy; then it
    shrinks, and growth begins anew."""

    def __init__(self, *, start: int, largest: int) -> None:
        self._size = float(min(start, largest))
        self._largest = largest
        self._growth = self._size
        """By how many microbatches the window grows in a round trip."""
        self._num_older = 0
        """How many of the microbatches under way were in flight already when the window last shrank."""

    @property
    def size(self) -> int:
        return max(1, int(self._size))

    def finished(self, *, num_busy: int, in_flight: int) -> None:
        """Adapt the window to a microbatch that came back; `num_busy` is how often peers answered Busy, and `in_flight`
        how many are under way, this one included."""
        is_older = self._num_older > 0
        self._num_older = max(0, self._num_older - 1)
        if num_busy:
            self._growth = _LEAST_GROWTH
            # Microbatches that were refused together shrink the window once, not once each.
            if not is_older:
                self._size = max(1.0, self._size * _DECREASE)
                self._num_older = in_flight - 1
        elif in_flight >= self.size:
            # Only a full window has shown that it is not too large.
            share = 1.0 / self._size
            self._size = min(float(self._largest), self._size + self._growth * share)
            self._growth = min(self._size, self._growth * 2**share)


@dataclass
class Work:
    """A microbatch that was granted."""

    microbatch: Microbatch
    granted_by: Block
    answered: bool = False
    """Whether the answer has come. The ack may still be under way, so no other trainer may run the microbatch, but its
    place in the window is free."""


class LeasedWork:
    """The microbatches that one trainer holds."""

    def __init__(
        self, *, config: RunConfig, leases: LeaseClient, clock: Clock, max_in_flight: int, on_waiting: OnWaiting
    ) -> None:
        """`on_waiting` is called if no leader of stage 0 answers while this trainer has nothing to do."""
        self._config = config
        self._leases = leases
        self._clock = clock
        self._on_waiting = on_waiting
        self._window = Window(start=2 * config.stages.num_stages, largest=max_in_flight)
        self._queue: deque[Work] = deque()
        self._in_flight: dict[int, tuple[Work, asyncio.Task[None]]] = {}
        self._released: dict[Block, list[int]] = {block: [] for block in config.blocks}
        """By the block whose leader granted them."""
        self._acknowledged: deque[tuple[float, int]] = deque(maxlen=MAX_NAMED)
        """The latest acknowledged microbatches, each with the time of its ack. They are sent to the leaders of later
        stages."""
        self._stage_0: pb.AcquireReply | None = None
        """The last answer of stage 0."""
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._num_pauses = 0
        self._renewed_at = clock.monotonic()

    @property
    def num_in_flight(self) -> int:
        """How many microbatches wait for an answer, and not only for their ack to arrive: over a long line an ack takes
        a whole round trip."""
        return sum(not work.answered for work, _ in self._in_flight.values())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All tasks, those included that only send an ack now."""
        return [task for _, task in self._in_flight.values()]

    @property
    def is_overdue(self) -> bool:
        """Whether the leases were not renewed for so long that another trainer may have them."""
        return self._clock.monotonic() - self._renewed_at > TRAINER_ACK_SECONDS

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let no microbatch begin inside the block; those in flight go on. In the synchronous setting the others are
        given back, because other trainers would wait for them."""
        self._num_pauses += 1
        if self._config.rounds.synchronous:
            self._give_up_queue()
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._changed.set()

    @property
    def _is_paused(self) -> bool:
        return self._num_pauses > 0

    # -- running the work ----------------------------------------------------------------------------------------------

    def next(self) -> Work | None:
        """Take out and return the work that begins now; None if none may.

        What two stages have lost is run for one, then for the other. In the second run most peers know it already.
        """
        if self._is_paused:
            return None
        waiting = (work for work in self._queue if work.microbatch.index not in self._in_flight)
        # Work that waits is mostly of one round, so room is computed once for each round.
        has_room = functools.cache(self._has_room)
        work = next((work for work in waiting if has_room(work.microbatch.round)), None)
        if work is not None:
            self._queue.remove(work)
        return work

    def _has_room(self, round_number: int) -> bool:
        """Whether one more microbatch of that round may be under way. Those of later rounds may wait for it, and do not
        count."""
        under_way = (work for work, _ in self._in_flight.values() if not work.answered)
        return sum(work.microbatch.round <= round_number for work in under_way) < self._window.size

    def begun(self, work: Work, task: asyncio.Task[None]) -> None:
        self._in_flight[work.microbatch.index] = (work, task)

    def answered(self, work: Work, *, num_busy: int) -> None:
        """Note that the answer has come and is about to be acknowledged."""
        self._window.finished(num_busy=num_busy, in_flight=self.num_in_flight)
        work.answered = True
        self._changed.set()
        self.note_acknowledged(work.microbatch)

    def note_acknowledged(self, microbatch: Microbatch) -> None:
        """Note that stage 0 counts a microbatch, or soon will, which the leaders of later stages are told."""
        # With DiLoCo leaders do not need this, because each microbatch is granted once.
        if self._config.rounds.synchronous and not microbatch.is_replay:
            self._acknowledged.append((self._clock.monotonic(), microbatch.index))

    def release(self, work: Work) -> None:
        """Give back a microbatch that was not run, with the next request to the leader that granted it."""
        self._released[work.granted_by].append(work.microbatch.index)

    def ended(self, work: Work) -> None:
        self._in_flight.pop(work.microbatch.index, None)
        self._changed.set()

    async def changed(self) -> None:
        """Wait until other work may begin. If there is room, more work is asked for meanwhile."""
        if self._room() > 0:
            self._wanted.set()
        self._changed.clear()
        await self._changed.wait()

    # -- leasing more --------------------------------------------------------------------------------------------------

    async def keep_leased(self, last_round: int) -> None:
        """Renew leases at stage 0, and ask it for more, up to round `last_round`. Runs until it is cancelled."""
        while True:
            if self.is_overdue:
                self.let_go()
            asked_at = self._clock.monotonic()
            if await self._acquire(last_round):
                self._renewed_at = asked_at
            self._wanted.clear()
            if self._room() > 0:
                # More is wanted, so stage 0 is asked again at once; it answers as soon as it has some.
                await self._clock.sleep(GAP_SECONDS)
                continue
            await wait(self._wanted, RENEW_SECONDS)

    async def replay_lost(self, block: Block, last_round: int) -> None:
        """Synchronous: lease microbatches that a block of a later stage has lost with a peer. Runs until it is
        cancelled."""
        while True:
            if self._stage_0 is not None:
                num_held = sum(work.granted_by == block for work in self._held() if not work.answered)
                room = 0 if self._is_paused else max(0, self._window.size - num_held)
                lost = await self._ask(block, room, wait_seconds=GRANT_WAIT_SECONDS, stage_0=self._stage_0)
                if lost is not None:
                    self._take(block, lost, last_round)
            await self._clock.sleep(LOST_GAP_SECONDS)

    async def give_back(self) -> None:
        """Release all leased microbatches, so that others need not wait until their leases expire."""
        for work in self._held():
            self.release(work)
        self._queue.clear()
        self._in_flight.clear()
        blocks = [block for block, released in self._released.items() if released]
        await asyncio.gather(*(self._ask(block, 0, wait_seconds=0.0) for block in blocks))

    def let_go(self) -> None:
        """Give up all work, because the leases were not renewed and another trainer may soon run the same."""
        if self._in_flight:
            logger.warning(
                "the leases were not renewed in time: %s given up", counted(len(self._in_flight), "microbatch")
            )
        self._give_up_queue()
        for task in self.tasks:
            task.cancel()

    async def _acquire(self, last_round: int) -> bool:
        room = self._room()
        leased = await self._ask(Block(0), room, wait_seconds=GRANT_WAIT_SECONDS if room else 0.0)
        if leased is None:
            if not self._queue and not self._in_flight:
                self._on_waiting(0, self._leases.obstacle(Block(0)))
            return False
        self._stage_0 = leased
        self._take(Block(0), leased, last_round)
        return True

    def _room(self) -> int:
        """How many more microbatches are wanted: enough for the window, and half as many to begin during a request.

        No more are held, because no other trainer could run them. Work of a later round than stage 0's does not count
        as held: it waits for a stage 0 that came back from a checkpoint.
        """
        if self._is_paused:
            return 0
        newest = math.inf if self._stage_0 is None else self._stage_0.round
        num_held = sum(work.microbatch.round <= newest for work in self._held() if not work.answered)
        return max(0, self._window.size + math.ceil(self._window.size / 2) - num_held)

    async def _ask(
        self, block: Block, count: int, wait_seconds: float, stage_0: pb.AcquireReply | None = None
    ) -> pb.AcquireReply | None:
        holding = [work.microbatch.index for work in self._held() if work.granted_by == block]
        released, self._released[block] = self._released[block], []
        # Acks are repeated for LEASE_SECONDS, because another peer may just be taking the lead.
        while self._acknowledged and self._clock.monotonic() - self._acknowledged[0][0] > LEASE_SECONDS:
            self._acknowledged.popleft()
        leased = await self._leases.acquire(
            block, count, holding=holding, released=released, wait_seconds=wait_seconds,
            acknowledged=[microbatch for _, microbatch in self._acknowledged], newest=stage_0,
        )  # fmt: skip
        if leased is None:
            self._released[block] += released
        return leased

    def _held(self) -> list[Work]:
        return [*self._queue, *(work for work, _ in self._in_flight.values())]

    def _take(self, block: Block, leased: pb.AcquireReply, last_round: int) -> None:
        self._drop_needless(block, leased)
        # Microbatches that were granted for a request from before a pause are given back. Otherwise others would wait
        # for them.
        if self._config.rounds.synchronous and (self._is_paused or leased.round > last_round):
            self._released[block] += leased.microbatches
            return
        known = {work.microbatch.index for work in self._held() if work.granted_by == block}
        only_at = leased.accumulate_only_at if leased.HasField("accumulate_only_at") else None
        size = self._config.data.microbatch_size
        new = [
            Work(Microbatch(index=index, round=leased.round, num_samples=size, accumulate_only_at=only_at), block)
            for index in leased.microbatches
            if index not in known
        ]
        # Replays come first: the next round waits for them.
        is_first = only_at is not None
        self._queue = deque([*new, *self._queue] if is_first else [*self._queue, *new])
        self._changed.set()

    def _drop_needless(self, block: Block, leased: pb.AcquireReply) -> None:
        """Drop the work whose round is over, or that the stage which granted it counts by now: another trainer has run
        it, or a peer has come back with it."""
        counted = frozenset(leased.counted)

        def is_needless(work: Work) -> bool:
            is_over = self._config.rounds.synchronous and work.microbatch.round < leased.round
            return work.granted_by == block and (is_over or work.microbatch.index in counted)

        self._queue = deque(work for work in self._queue if not is_needless(work))
        for work, task in self._in_flight.values():
            # Only replays are cancelled: others are answered soon anyway. An ack that is under way should arrive.
            if work.microbatch.is_replay and not work.answered and is_needless(work):
                task.cancel()

    def _give_up_queue(self) -> None:
        for work in self._queue:
            self.release(work)
        self._queue.clear()
