"""The microbatches that a trainer has leased: those that wait, those that are under way, and their leases.

Asks the leaders for as many as the windows have room for, renews the leases, and gives up microbatches whose leases it
could not renew. Each path has a window of its own, so that one that is busy or stands still takes no room from others.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.hop.answers import Obstacle, OnWaiting
from swarm.machine.clock import Clock, wait
from swarm.machine.words import counted
from swarm.pipeline.lease_service import MAX_NAMED, LeaseClient
from swarm.pipeline.trainer_paths import TrainerPaths, Windows
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


@dataclass
class Work:
    microbatch: Microbatch
    granted_by: Block
    answered: bool = False
    """Whether the answer has come. The ack may still be under way, so no other trainer may run the microbatch, but its
    place in the window is free."""


class LeasedWork:
    def __init__(
        self, *, config: RunConfig, paths: TrainerPaths, leases: LeaseClient, clock: Clock, max_in_flight: int,
        on_waiting: OnWaiting,
    ) -> None:  # fmt: skip
        """`on_waiting` is called if no leader of stage 0 answers, or a block has no peers, while this trainer has
        nothing to do."""
        self._config = config
        self._leases = leases
        self._clock = clock
        self._on_waiting = on_waiting
        self._paths = paths
        self._windows = Windows(paths.paths, num_stages=config.stages.num_stages, max_in_flight=max_in_flight)
        self._queue: deque[Work] = deque()
        self._in_flight: dict[int, tuple[Work, asyncio.Task[None]]] = {}
        self._released: dict[Block, list[int]] = {block: [] for block in config.blocks}
        """By the block whose leader granted them."""
        self._acknowledged: deque[tuple[float, int]] = deque(maxlen=MAX_NAMED)
        """The latest acknowledged microbatches, each with the time of its ack. They are sent to the leaders of later
        stages."""
        self._stage_0: dict[Block, pb.AcquireReply] = {}
        """The last answer of each block of stage 0."""
        self._wanted = {block: asyncio.Event() for block in paths.entries}
        self._changed = asyncio.Event()
        self._num_pauses = 0
        self._renewed_at = dict.fromkeys(paths.entries, clock.monotonic())

    @property
    def num_in_flight(self) -> int:
        """How many microbatches wait for an answer, and not only for their ack to arrive: over a long line an ack takes
        a whole round trip."""
        return sum(not work.answered for work, _ in self._in_flight.values())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All tasks, those included that only send an ack now."""
        return [task for _, task in self._in_flight.values()]

    def is_overdue(self, entry: Block) -> bool:
        """Whether the leases of a block of stage 0 were not renewed for so long that another trainer may have them."""
        return self._clock.monotonic() - self._renewed_at[entry] > TRAINER_ACK_SECONDS

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
        # Work that waits is mostly of one round, so room is computed once for each path and round.
        has_room = functools.cache(self._has_room)
        work = next((work for work in waiting if has_room(self._path_of(work), work.microbatch.round)), None)
        if work is not None:
            self._queue.remove(work)
        return work

    def _has_room(self, path: int, round_number: int) -> bool:
        """Whether one more microbatch of that path and round may be under way. Those of later rounds may wait for it,
        and do not count."""
        num = sum(work.microbatch.round <= round_number for work in self._under_way(path))
        return num < self._windows[path].size and self._paths.is_live(path)

    def _under_way(self, path: int) -> list[Work]:
        return [work for work, _ in self._in_flight.values() if not work.answered and self._path_of(work) == path]

    def _path_of(self, work: Work) -> int:
        return self._config.path_of(work.microbatch.index)

    def begun(self, work: Work, task: asyncio.Task[None]) -> None:
        self._in_flight[work.microbatch.index] = (work, task)

    def answered(self, work: Work, *, num_busy: int) -> None:
        """Note that the answer has come and is about to be acknowledged."""
        path = self._path_of(work)
        self._windows[path].finished(num_busy=num_busy, in_flight=len(self._under_way(path)))
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
        for entry, wanted in self._wanted.items():
            if self._room(entry):
                wanted.set()
        self._changed.clear()
        await self._changed.wait()

    # -- leasing more --------------------------------------------------------------------------------------------------

    async def keep_leased(self, entry: Block, last_round: int) -> None:
        """Renew leases at a block of stage 0, and ask it for more, up to round `last_round`. Runs until it is
        cancelled."""
        while True:
            self._paths.say_changes()
            if self.is_overdue(entry):
                self.let_go(entry)
            asked_at = self._clock.monotonic()
            if await self._acquire(entry, last_round):
                self._renewed_at[entry] = asked_at
            self._wanted[entry].clear()
            if self._room(entry):
                # More is wanted, so stage 0 is asked again at once; it answers as soon as it has some.
                await self._clock.sleep(GAP_SECONDS)
                continue
            await wait(self._wanted[entry], RENEW_SECONDS)

    async def replay_lost(self, block: Block, last_round: int) -> None:
        """Synchronous: lease microbatches that a block of a later stage has lost with a peer. Runs until it is
        cancelled."""
        while True:
            if (stage_0 := self._newest()) is not None:
                held = self._num_held(lambda work: work.granted_by == block)
                wish = [] if self._is_paused else self._windows.wish(self._paths.through(block), held)
                lost = await self._ask(block, wish, wait_seconds=GRANT_WAIT_SECONDS, stage_0=stage_0)
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
        await asyncio.gather(*(self._ask(block, [], wait_seconds=0.0) for block in blocks))

    def let_go(self, entry: Block) -> None:
        """Give up all work on paths that begin at a block, because the leases were not renewed and another trainer may
        soon run the same."""
        tasks = [task for work, task in self._in_flight.values() if self._entry_of(work) == entry]
        if tasks:
            logger.warning("the leases were not renewed in time: %s given up", counted(len(tasks), "microbatch"))
        self._give_up_queue(entry)
        for task in tasks:
            task.cancel()

    async def _acquire(self, entry: Block, last_round: int) -> bool:
        wish = self._room(entry)
        leased = await self._ask(entry, wish, wait_seconds=GRANT_WAIT_SECONDS if wish else 0.0)
        if not self._queue and not self._in_flight:
            if leased is None:
                self._on_waiting(entry, self._leases.obstacle(entry))
            elif (missing := self._paths.missing) is not None:
                self._on_waiting(missing, Obstacle(num_peers=0))
        if leased is None:
            return False
        self._stage_0[entry] = leased
        self._take(entry, leased, last_round)
        return True

    def _room(self, entry: Block) -> list[int]:
        """The paths that begin at a block and of which more microbatches are wanted, each as often as more are: enough
        for the window, and half as many to begin during a request.

        No more are held, because no other trainer could run them. Work of a later round than stage 0's does not count
        as held: it waits for a stage 0 that came back from a checkpoint.
        """
        if self._is_paused:
            return []
        newest = self._stage_0[entry].round if entry in self._stage_0 else math.inf
        held = self._num_held(lambda work: work.microbatch.round <= newest)
        return self._windows.wish(filter(self._paths.is_live, self._paths.through(entry)), held, ahead=0.5)

    def _num_held(self, counts: Callable[[Work], bool]) -> Counter[int]:
        """How many microbatches without an answer are held, by path, of those that count."""
        return Counter(self._path_of(work) for work in self._held() if not work.answered and counts(work))

    def _newest(self) -> pb.AcquireReply | None:
        """What stage 0 has granted and has, of the round of its block that has come least far; None if a block of it
        has not answered yet."""
        replies = self._stage_0.values()
        if len(replies) < len(self._paths.entries):
            return None
        oldest = min(reply.round for reply in replies)
        last = [reply for reply in replies if reply.round == oldest]
        return pb.AcquireReply(
            round=oldest, round_granted=all(reply.round_granted for reply in last),
            round_complete=all(reply.round_complete for reply in last),
        )  # fmt: skip

    async def _ask(
        self, block: Block, wish: Sequence[int], wait_seconds: float, stage_0: pb.AcquireReply | None = None
    ) -> pb.AcquireReply | None:
        holding = [work.microbatch.index for work in self._held() if work.granted_by == block]
        released, self._released[block] = self._released[block], []
        # Acks are repeated for LEASE_SECONDS, because another peer may just be taking the lead.
        while self._acknowledged and self._clock.monotonic() - self._acknowledged[0][0] > LEASE_SECONDS:
            self._acknowledged.popleft()
        leased = await self._leases.acquire(
            block, wish, holding=holding, released=released, wait_seconds=wait_seconds,
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

    def _give_up_queue(self, entry: Block | None = None) -> None:
        """Release what waits; with `entry` only what begins at that block."""
        given_up = [work for work in self._queue if entry in (None, self._entry_of(work))]
        for work in given_up:
            self._queue.remove(work)
            self.release(work)

    def _entry_of(self, work: Work) -> Block:
        return self._paths.entry_of(work.microbatch.index)
