"""Peers that look, claim and move by themselves, all in one process and on virtual time; the moves are stand-ins."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from peers.shared.network import Membership
from peers.stage_peer.rebalancer import Claim, Rebalancer
from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.rebalancing.layout import Span
from swarm.routing.poll import Poll
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block, PeerId, PeerRecord, PeerState
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import LoopClock

PERIOD_SECONDS = 60.0
MOVE_SECONDS = 8.0
CONFIG = RunConfig(model=ModelConfig(num_layers=3, custom_class="a.b:C"), stages=StagesConfig(num_stages=3))
VARIANTS = dataclasses.replace(CONFIG, stages=StagesConfig(num_stages=3, variants=(1, 2, 1)))


class SlowStore(MemoryStore):
    """A DHT that is slow, and can be unreachable."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock)
        self._clock, self._rng = clock, rng
        self.is_gone = False

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        await self._answer()
        return await super().store(key, subkey, value, expiration)

    async def get(self, key: str, *, partly: bool = False) -> dict[str, tuple[bytes, float]]:
        await self._answer()
        return await super().get(key)

    async def _answer(self) -> None:
        await self._clock.sleep(self._rng.uniform(0.0, 0.8))
        if self.is_gone:
            raise PeerUnavailable("gone")


class Peer:
    """Announces itself, and does what its rebalancer says."""

    def __init__(
        self, world: "World", number: int, spans: Sequence[range] | None = None, *, starts_over: bool = False
    ) -> None:
        self.world = world
        identity = generate()
        self.peer_id = PeerId(identity.peer_id)
        clock, rng = world.clock, random.Random(number)
        member = Membership.enter(world.config, world.store, identity, clock, insecure=True)
        self.directory, self.known = member.directory, member.known
        self.claim = Claim(member, str(number))
        self.rebalancer = Rebalancer(
            member,
            self.claim,
            rng,
            every_seconds=PERIOD_SECONDS,
            checkpoints=world.checkpoints,
            spans=spans,
            starts_over=starts_over,
        )
        self.span: Span = ()
        """What it serves; nothing while it is dead or on its way."""
        self.state = PeerState.SERVING
        self.round = world.round
        self.lineage = "one"
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def stage(self) -> int | None:
        return self.span[0].stage if self.span else None

    @stage.setter
    def stage(self, stage: int | None) -> None:
        self.span = () if stage is None else (Block(stage),)

    def start(self, tasks: asyncio.TaskGroup, stage: int | None = None) -> None:
        """Serve a stage, or the one that the peer chooses."""
        self.tasks = [tasks.create_task(work) for work in (self._live(stage), self.claim.keep(), self.keep_announced())]

    def kill(self) -> None:
        """Kill the peer, which stays announced for a while."""
        self.stage = None
        for task in self.tasks:
            task.cancel()

    async def _live(self, stage: int | None) -> None:
        self.span = (Block(stage),) if stage is not None else await self.rebalancer.choose_span()
        while True:
            await self.announce()
            await self.rebalancer.arrived(self.span)
            going = await self.rebalancer.next_move(self.span, dict)
            left = [block for block in self.span if block not in going]
            if not all([await self.rebalancer.can_spare(block) for block in left]):
                await self.rebalancer.gave_up(going, before=self.span)
                continue
            self.world.moves.append((self.world.clock.monotonic(), self.span[0].stage, going[0].stage))
            self.span = tuple(block for block in self.span if block in going)
            for block in left:
                await self.directory.withdraw(block)
            await self.world.clock.sleep(MOVE_SECONDS)
            self.span = going

    async def keep_announced(self) -> None:
        while True:
            await self.world.clock.sleep(5.0)
            await self.announce()

    async def announce(self) -> None:
        for block in self.span:
            record = PeerRecord(
                peer_id=self.peer_id, announced_at=self.world.clock.time(), stage=block.stage, variant=block.variant,
                endpoint="192.0.2.1:1", state=self.state, samples_per_second=10.0 / len(self.span), movable=True,
                round=self.round,
            )  # fmt: skip
            with suppress(PeerUnavailable):
                await self.directory.announce(record, 20.0)


class World:
    """All peers, and what happened."""

    def __init__(
        self, *, seed: int = 0, round_number: int = 0, checkpoints: Path | None = None, config: RunConfig = CONFIG
    ) -> None:
        self.config = config
        self.clock = LoopClock()
        self.store = SlowStore(self.clock, random.Random(seed))
        self.round = round_number
        self.checkpoints = checkpoints
        self.peers = [Peer(self, 1000 * seed + number) for number in range(12)]
        self.moves: list[tuple[float, int, int]] = []
        """When, from which stage, to which stage."""
        self.least = 99

    def counts(self) -> list[int]:
        """Living peers by stage."""
        counter = Counter(peer.stage for peer in self.peers)
        return [counter[stage] for stage in range(3)]

    async def watch(self) -> None:
        """Note the smallest number of peers that any stage has at any time."""
        while True:
            self.least = min(self.least, *self.counts())
            await self.clock.sleep(0.1)


def make_world(
    monkeypatch: pytest.MonkeyPatch, silent: Callable[[Peer], bool] = lambda _: False, **options: Any
) -> World:
    """A world whose living peers answer, but for silent ones."""
    world = World(**options)

    async def replies(_: Poll, records: Sequence[PeerRecord]) -> list[pb.DescribeReply]:
        await world.clock.sleep(0.01)
        living = {p.peer_id: p for p in world.peers if p.stage is not None and not silent(p)}
        asked = [living[PeerId(r.peer_id)] for r in records if r.peer_id in living]
        return [
            pb.DescribeReply(peer_id=peer.peer_id, state=peer.state, round=peer.round, lineage=peer.lineage)
            for peer in asked
        ]

    monkeypatch.setattr(Poll, "replies", replies)
    return world


@asynccontextmanager
async def living(world: World, stages: Sequence[int | None]) -> AsyncIterator[None]:
    """Inside the block peers live that were started at these stages."""
    async with asyncio.TaskGroup() as tasks:
        for peer, stage in zip(world.peers, stages, strict=False):
            peer.start(tasks, stage)
        await world.clock.sleep(20.0)
        watching = tasks.create_task(world.watch())
        yield
        watching.cancel()
        for peer in world.peers:
            peer.kill()
