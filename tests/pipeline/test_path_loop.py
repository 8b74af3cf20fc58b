"""The trainer's loop in a run of several paths: what happens on one path is nothing to the others."""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Self, cast

import torch

from swarm.config import RoundsConfig, RunConfig, StagesConfig
from swarm.data.microbatches import Microbatches, Texts
from swarm.data.prepared import Prepared
from swarm.errors import PathStandsStill
from swarm.hop.answers import HopListener, Obstacle
from swarm.hop.hop import Hop
from swarm.pipeline.lease_service import LeaseClient
from swarm.pipeline.leased_work import LeasedWork
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.train_loop import MAX_FAILURES, Step, TrainLoop
from swarm.pipeline.trainer_paths import LEFT_ALONE_SECONDS, TrainerPaths
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.training.samples import TOKENS, Microbatch
from swarm.types import LEASE_SECONDS, Block, PeerId, PeerRecord, PeerState
from tests.support.virtual_time import LoopClock, in_virtual_time

DILOCO = RunConfig(
    stages=StagesConfig(num_stages=3, variants=(2, 2, 1)), rounds=RoundsConfig(setting="diloco", round_samples=64)
)
SYNCHRONOUS = replace(DILOCO, rounds=RoundsConfig(setting="synchronous", round_samples=64))
FIRST, SECOND = Block(0), Block(0, 1)


class Reply:
    loss, num_reroutes, num_busy = 1.0, 0, 0

    def __init__(self) -> None:
        self.route: dict[Block, PeerId] = {}

    async def ack(self) -> None:
        pass

    def close(self) -> None:
        pass


class World:
    """The swarm as a trainer sees it. It grants what is asked for."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.clock = LoopClock()
        self.ids = {path: itertools.count(path, len(config.paths)) for path in range(len(config.paths))}
        self.asked: list[tuple[Block, Counter[int]]] = []
        """What leaders were asked for, by path."""
        self.silent = set[Block]()
        """Blocks of which no leader answers."""
        self.rounds = Counter[Block]()
        self.granted = defaultdict[Block, bool](bool)
        """The blocks that have granted and have their whole round, by their own account."""
        self.newest: list[pb.AcquireReply] = []
        """What later stages were told of stage 0."""
        self.released: list[int] = []
        self.begun = Counter[int]()
        """How many microbatches began, by path."""
        self.still = set[int]()
        """The paths whose microbatches are given back."""
        self.answers = {path: asyncio.Event() for path in self.ids}
        self.waits: list[tuple[Block, Obstacle]] = []
        self.empty = set[Block]()
        """Blocks without peers."""
        self.round = 0

    def peers(self, block: Block) -> list[PeerRecord]:
        if block in self.empty:
            return []
        return [
            PeerRecord(
                peer_id="0" * 40, announced_at=0.0, stage=block.stage, variant=block.variant, endpoint="127.0.0.1:1",
                state=PeerState.SERVING,
            )
        ]  # fmt: skip

    def obstacle(self, block: Block) -> Obstacle:
        return Obstacle(num_peers=1, causes="no leader yet")

    async def acquire(
        self, block: Block, paths: Sequence[int], *, released: Sequence[int], newest: pb.AcquireReply | None = None,
        **options: Any,
    ) -> pb.AcquireReply | None:  # fmt: skip
        self.asked.append((block, Counter(paths)))
        if newest is not None:
            self.newest.append(newest)
        if block in self.silent:
            return None
        self.released += released
        fresh = [next(self.ids[path]) for path in paths] if block.stage == 0 else []
        return pb.AcquireReply(
            round=self.rounds[block], microbatches=fresh, round_granted=self.granted[block],
            round_complete=self.granted[block],
        )  # fmt: skip

    async def train(
        self, microbatch: Microbatch, tensors: object, listener: HopListener, hints: Mapping[Block, Any]
    ) -> Reply:
        path = self.config.path_of(microbatch.index)
        self.begun[path] += 1
        if path in self.still:
            raise PathStandsStill("stage 1.1 has no peers")
        await self.answers[path].wait()
        await asyncio.sleep(0.2)
        return Reply()

    async def poll(self, wait_seconds: float = 0.0) -> None:
        pass

    def report(self, step: int) -> None:
        pass

    def weighted(self, weights: tuple[float, ...]) -> Self:
        return self

    def preparing(self, index: int) -> list[Future[Prepared]]:
        return []

    def samples(self, index: int) -> dict[str, torch.Tensor]:
        return {TOKENS: torch.zeros(1, 2, dtype=torch.int32)}

    def wanted(self, since: int = 0) -> Counter[int]:
        """How often each path was asked for since a certain request."""
        return Counter(path for _, paths in self.asked[since:] for path in paths.elements())


@asynccontextmanager
async def running(config: RunConfig, *, chosen: Sequence[int] = (), max_in_flight: int = 32) -> AsyncIterator[World]:
    world = World(config)
    paths = TrainerPaths(config, world.clock, world.peers, chosen)
    work = LeasedWork(
        config=config, paths=paths, leases=cast(LeaseClient, world), clock=world.clock, max_in_flight=max_in_flight,
        on_waiting=lambda block, obstacle: world.waits.append((block, obstacle)),
    )  # fmt: skip
    loop = TrainLoop(
        config=config, paths=paths, texts=Texts(cast(Microbatches, world), config.data),
        hops={block: cast(Hop, world) for block in paths.entries}, work=work, watcher=cast(RoundWatcher, world),
        clock=world.clock, on_waiting=lambda block, obstacle: None,
    )  # fmt: skip

    async def ignore(step: Step) -> None:
        pass

    task = asyncio.create_task(loop.run(0, 1, ignore))
    try:
        yield world
        assert not task.done(), "it goes on"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@in_virtual_time
async def test_a_path_whose_answers_do_not_come_keeps_nothing_from_the_others() -> None:
    async with running(DILOCO) as world:
        for path in (0, 2, 3):
            world.answers[path].set()
        await asyncio.sleep(4.0)
        assert world.begun[1] == 6, "its window"
        assert min(world.begun[path] for path in (0, 2, 3)) > 100


@in_virtual_time
async def test_a_path_that_stands_still_is_left_alone_and_is_no_failure() -> None:
    async with running(DILOCO) as world:
        world.still = {1}
        for answer in world.answers.values():
            answer.set()
        await asyncio.sleep(1.0)
        begun, since = dict(world.begun), len(world.asked)
        assert 0 < begun[1] <= 9, "what had been granted when the first came back"
        await asyncio.sleep(LEFT_ALONE_SECONDS - 2.0)
        assert world.begun[1] == begun[1]
        assert 1 not in world.wanted(since)
        assert set(range(1, 4 * begun[1], 4)) <= set(world.released)
        await asyncio.sleep(MAX_FAILURES * LEFT_ALONE_SECONDS / 4)
        assert world.begun[1] > begun[1], "it is tried again"
        world.still.clear()
        await asyncio.sleep(LEFT_ALONE_SECONDS + 2.0)
        assert world.begun[1] > MAX_FAILURES


@in_virtual_time
async def test_a_path_of_which_a_block_has_no_peers_is_not_asked_for() -> None:
    async with running(DILOCO) as world:
        world.empty.add(Block(1, 1))
        for answer in world.answers.values():
            answer.set()
        await asyncio.sleep(1.0)
        assert {path for path in world.ids if world.begun[path]} == {0, 2}
        assert set(world.wanted()) == {0, 2}
        world.empty.clear()
        await asyncio.sleep(1.0)
        assert min(world.begun[path] for path in world.ids) > 10
        assert not world.waits


@in_virtual_time
async def test_a_trainer_whose_paths_all_stand_still_says_what_is_missing() -> None:
    async with running(DILOCO, chosen=[0, 2]) as world:
        world.empty.add(Block(1))
        await asyncio.sleep(1.0)
        assert set(world.waits) == {(Block(1), Obstacle(num_peers=0))}
        assert not world.begun


@in_virtual_time
async def test_a_block_of_stage_0_that_is_silent_ends_only_the_leases_of_its_paths() -> None:
    async with running(DILOCO) as world:
        world.answers[0].set()
        await asyncio.sleep(1.0)
        assert world.begun[2] == 6
        world.silent.add(SECOND)
        await asyncio.sleep(LEASE_SECONDS + 1.0)
        begun = world.begun[0]
        assert begun > 100
        assert world.begun[1] == 6, "its leases were renewed"
        world.silent.clear()
        await asyncio.sleep(1.0)
        assert set(range(2, 26, 4)) <= set(world.released)
        assert world.begun[0] > begun
        assert world.begun[2] > 6


@in_virtual_time
async def test_later_stages_are_told_what_all_blocks_of_stage_0_have_granted() -> None:
    """Else a later stage would have replayed what is still on its way."""
    async with running(SYNCHRONOUS) as world:
        world.silent.add(SECOND)
        await asyncio.sleep(0.5)
        assert not world.newest, "one block has told nothing yet"
        world.silent.clear()
        world.granted[FIRST] = True
        expected = [(0, False), (0, True), (0, False), (1, False), (1, True)]
        told = []
        for first, second, granted in ((0, 0, 1), (0, 0, 2), (1, 0, 1), (1, 1, 1), (1, 1, 2)):
            world.rounds.update({FIRST: first - world.rounds[FIRST], SECOND: second - world.rounds[SECOND]})
            world.granted[SECOND] = granted == 2
            await asyncio.sleep(2.0)
            newest = world.newest[-1]
            assert newest.round_granted == newest.round_complete
            told.append((newest.round, newest.round_granted))
        assert told == expected
        assert {block for block, _ in world.asked} == set(SYNCHRONOUS.blocks)
