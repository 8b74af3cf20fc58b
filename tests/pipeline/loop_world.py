"""A trainer's loop with a hop and leases that a test controls: stage 0 as the trainer sees it."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, cast

import torch

from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches, Texts
from swarm.data.prepared import Prepared
from swarm.hop.answers import HopListener, Obstacle
from swarm.hop.hop import Hop
from swarm.pipeline.lease_service import LeaseClient
from swarm.pipeline.leased_work import LeasedWork
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.train_loop import Step, TrainLoop
from swarm.pipeline.trainer_paths import TrainerPaths
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.training.samples import TOKENS, Microbatch
from swarm.types import Block, PeerId
from tests.support.chain import DILOCO, eventually
from tests.support.manual_clock import ManualClock


class Reply:
    loss, num_reroutes, num_busy = 1.0, 0, 0

    def __init__(self) -> None:
        self.route = {Block(0): PeerId("a"), Block(1): PeerId("b"), Block(2): PeerId("c")}
        self.acked = self.closed = False
        self.ack_arrives = asyncio.Event()
        self.ack_arrives.set()

    async def ack(self) -> None:
        await self.ack_arrives.wait()
        self.acked = True

    def close(self) -> None:
        self.closed = True


class World:
    """Stage 0 as a trainer sees it: it grants microbatch 0, and answers when it is told to."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reply = Reply()
        self.answer = asyncio.Event()
        self.reachable = True
        self.work: LeasedWork
        self.released: list[int] = []
        self.released_later: list[int] = []
        """Microbatches that were released to later stages."""
        self.num_runs = 0
        self.stage_0_round = 0
        self.num_granted = 0
        self.wanted: list[int] = []
        """How many microbatches stage 0 was asked for, each time."""
        self.wanted_later: list[int] = []
        self.num_there = 1
        """How many microbatches there are to grant."""
        self.lost: list[int] = []
        """The microbatches that a later stage has lost."""
        self.losing_stage = 1
        self.later_round = 0
        """The round of stage 1."""
        self.counted: set[int] = set()
        """The microbatches that another trainer ran meanwhile."""
        self.num_asked = 0
        """How often a later stage was asked."""
        self.told: dict[int, list[int]] = {}
        """By stage: the microbatches of which it was last told that stage 0 has them."""
        self.trained: list[Microbatch] = []
        self.hints: list[dict[Block, PeerId]] = []
        self.round = 0
        self.steps: list[Step] = []
        self.numbers: list[int] = []
        """Which of the data's microbatches were read."""
        self.part: Future[Prepared] = Future()
        self.part.set_running_or_notify_cancel()
        self.waits_for_part = False

    def obstacle(self, block: Block) -> Obstacle:
        assert not self.reachable
        return Obstacle(num_peers=1, num_silent=1, causes="gpu-1: no answer")

    async def acquire(
        self, block: Block, paths: Sequence[int], *, holding: Collection[int], released: Collection[int],
        wait_seconds: float, acknowledged: Collection[int] = (), newest: pb.AcquireReply | None = None,
    ) -> pb.AcquireReply | None:  # fmt: skip
        if not self.reachable:
            return None
        stage, count = block.stage, len(paths)
        self.told[stage] = list(acknowledged)
        if stage:
            self.num_asked += 1
            self.wanted_later.append(count)
            self.released_later += released
            lost: list[int] = []
            if stage == self.losing_stage:
                lost, self.lost = self.lost, []
            return pb.AcquireReply(
                round=self.later_round, microbatches=lost, accumulate_only_at=stage, counted=self.counted
            )
        self.released += released
        self.wanted.append(count)
        fresh = range(self.num_granted, min(self.num_there, self.num_granted + count))
        self.num_granted = max(self.num_granted, fresh.stop)
        return pb.AcquireReply(round=self.stage_0_round, microbatches=fresh)

    async def train(
        self, microbatch: Microbatch, tensors: Mapping[str, Any], listener: HopListener, hints: Mapping[Block, Any]
    ) -> Reply:
        self.num_runs += 1
        self.trained.append(microbatch)
        self.hints.append(dict(hints))
        await self.answer.wait()
        return self.reply

    async def poll(self, wait_seconds: float = 0.0) -> None:
        pass

    def report(self, step: int) -> None:
        pass

    async def on_step(self, step: Step) -> None:
        self.steps.append(step)

    def weighted(self, weights: tuple[float, ...]) -> Self:
        return self

    def preparing(self, index: int) -> list[Future[Prepared]]:
        return [self.part] if self.waits_for_part else []

    def samples(self, index: int) -> dict[str, torch.Tensor]:
        self.numbers.append(index)
        return {TOKENS: torch.zeros(1, 2, dtype=torch.int32)}


@asynccontextmanager
async def running(config: RunConfig = DILOCO, max_in_flight: int = 6, first: int = 0) -> AsyncIterator[World]:
    """A loop that has begun to run the microbatch, and ends with round `first`, which the stages are in."""
    world = World()
    world.round = first
    paths = TrainerPaths(config, world.clock, lambda block: [])
    world.work = LeasedWork(
        config=config, paths=paths, leases=cast(LeaseClient, world), clock=world.clock, max_in_flight=max_in_flight,
        on_waiting=lambda block, obstacle: None,
    )  # fmt: skip
    loop = TrainLoop(
        config=config, paths=paths, texts=Texts(cast(Microbatches, world), config.data),
        hops={Block(0): cast(Hop, world)},
        work=world.work, watcher=cast(RoundWatcher, world), clock=world.clock,
        on_waiting=lambda block, obstacle: None,
    )  # fmt: skip
    task = asyncio.create_task(loop.run(first, 1, world.on_step))
    await eventually(lambda: world.num_runs == 1, meanwhile=lambda: world.clock.advance(0.02))
    try:
        yield world
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def pass_time(world: World) -> None:
    world.clock.advance(0.1)
