"""Peers that look, claim and move by themselves, all in one process and on virtual time; the moves are stand-ins."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from peers.shared.network import Membership
from peers.stage_peer.rebalancer import Claim, Rebalancer
from swarm.checkpoint import file
from swarm.config import AveragingConfig, ModelConfig, RunConfig, StagesConfig
from swarm.credentials.identity import generate
from swarm.errors import Fatal, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.rebalancing.layout import Span
from swarm.routing.poll import Poll
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block, ClaimState, PeerId, PeerRecord, PeerState
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import LoopClock, in_virtual_time, run

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


def _world(monkeypatch: pytest.MonkeyPatch, silent: Callable[[Peer], bool] = lambda _: False, **options: Any) -> World:
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
async def _living(world: World, stages: Sequence[int | None]) -> AsyncIterator[None]:
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


@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_newcomers_that_start_together_spread(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    world = _world(monkeypatch, seed=seed)
    async with _living(world, [0, *[None] * 8]):
        assert world.counts() == [3, 3, 3]
    assert world.moves == []


@in_virtual_time
async def test_peers_spread_over_variants_and_one_takes_over_from_the_last_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = _world(monkeypatch, config=VARIANTS)

    def served() -> dict[str, int]:
        return dict(sorted(Counter(str(block) for peer in world.peers for block in peer.span).items()))

    async with _living(world, [None] * 6):
        assert served() == {"0": 2, "1": 1, "1.1": 1, "2": 2}
        [last] = [peer for peer in world.peers if Block(1, 1) in peer.span]
        last.kill()
        await world.clock.sleep(3 * PERIOD_SECONDS)
        assert served() in ({"0": 1, "1": 1, "1.1": 1, "2": 2}, {"0": 2, "1": 1, "1.1": 1, "2": 1})
        assert len(world.moves) == 1


@in_virtual_time
async def test_a_peer_that_was_told_its_blocks_claims_all_of_them() -> None:
    world = World(config=VARIANTS)
    told, newcomer = world.peers[:2]
    await told.rebalancer.goes((Block(0), Block(1), Block(1, 1)))
    assert await newcomer.rebalancer.choose_span() == (Block(2),)


@in_virtual_time
async def test_a_path_that_has_not_begun_is_for_newcomers_that_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world(monkeypatch, config=VARIANTS, round_number=3)
    async with _living(world, [0, 1, 2]):
        assert await world.peers[3].rebalancer.choose_span() in [(Block(stage),) for stage in range(3)]
        assert await Peer(world, 12, starts_over=True).rebalancer.choose_span() == (Block(1, 1),)


@pytest.mark.parametrize("stage", range(3))
@in_virtual_time
async def test_a_peer_that_was_killed_and_is_back_at_once_fills_the_gap_that_it_left(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Its former record stays for some more seconds, as if a peer still served its stage."""
    world = _world(monkeypatch)
    async with _living(world, [0, 1, 2]):
        world.peers[stage].kill()
        async with asyncio.TaskGroup() as tasks:
            world.peers[stage].start(tasks)
            await world.clock.sleep(10.0)
            assert world.counts() == [1, 1, 1]
            world.peers[stage].kill()


@pytest.mark.parametrize("seed", range(2))
@in_virtual_time
async def test_a_gap_is_filled_by_as_many_as_are_needed_and_then_all_is_quiet(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = _world(monkeypatch, seed=seed)
    async with _living(world, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]):
        killed_at = world.clock.monotonic()
        for peer in [p for p in world.peers if p.stage == 1][:3]:
            peer.kill()
        await world.clock.sleep(2 * PERIOD_SECONDS)
        assert world.counts() == [3, 3, 3]
        assert len(world.moves) == 2, "two moved, whoever else wanted to"
        assert {target for _, _, target in world.moves} == {1}
        assert {source for _, source, _ in world.moves} == {0, 2}
        assert all(at - killed_at < 2 * PERIOD_SECONDS for at, _, _ in world.moves)
        await world.clock.sleep(5 * PERIOD_SECONDS)
        assert len(world.moves) == 2
    assert world.least >= 1


@pytest.mark.parametrize("silent", [0, 1])
@in_virtual_time
async def test_nobody_leaves_silent_peers_alone_nor_goes_to_them(monkeypatch: pytest.MonkeyPatch, silent: int) -> None:
    """Silent peers are announced, but dead or cut off from here."""
    world = _world(monkeypatch, silent=lambda peer: peer.stage == silent)
    async with _living(world, [0, 0, 0, 0, 1, 2, 2]):
        await world.clock.sleep(5 * PERIOD_SECONDS)
        assert world.moves == []


@in_virtual_time
async def test_nobody_leaves_a_mate_alone_that_has_fallen_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other peer of the stage still has to get the state, and only this peer has it."""
    world = _world(monkeypatch, round_number=7)
    first, second = world.peers[:2]
    async with _living(world, [0, 0, 1, 2]):
        assert await first.rebalancer.can_spare(Block(0), round_number=7)
        second.round = 6
        assert not await first.rebalancer.can_spare(Block(0), round_number=7)


@in_virtual_time
async def test_nobody_leaves_its_stage_to_a_mate_that_has_learnt_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mate began the stage anew at the same round, when it saw no other peer."""
    world = _world(monkeypatch, round_number=7)
    first, second = world.peers[:2]
    async with _living(world, [0, 0, 1, 2]):
        assert await first.rebalancer.can_spare(Block(0), round_number=7, lineage="one")
        second.lineage = "another"
        assert not await first.rebalancer.can_spare(Block(0), round_number=7, lineage="one")
        second.round = 8
        assert await first.rebalancer.can_spare(Block(0), round_number=7, lineage="one")


@in_virtual_time
async def test_where_rounds_need_a_majority_nobody_leaves_too_few_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining peers would wait for ever for a peer that serves another stage."""
    world = _world(monkeypatch, config=dataclasses.replace(CONFIG, averaging=AveragingConfig(quorum="majority")))
    first, second, third, fourth, *_ = world.peers
    three = {peer.peer_id for peer in (first, second, third)}
    async with _living(world, [0, 0, 0, 1, 1, 2]):
        assert not await fourth.rebalancer.can_spare(Block(1))
        assert await first.rebalancer.can_spare(Block(0))
        assert await first.rebalancer.can_spare(Block(0), last_members=three)
        assert not await first.rebalancer.can_spare(Block(0), last_members={first.peer_id, second.peer_id}), (
            "third is new"
        )
        gone = {"d" * 40, "e" * 40}
        assert not await first.rebalancer.can_spare(Block(0), last_members={*three, *gone})
        second.lineage = "another"
        assert not await first.rebalancer.can_spare(Block(0), lineage="one", last_members=three)
        assert world.moves == []


def test_what_a_run_has_learnt_is_not_replaced_by_initial_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def moves(round_number: int, checkpoints: Path | None = None) -> set[int]:
        world = _world(monkeypatch, round_number=round_number, checkpoints=checkpoints)
        async with _living(world, [0, 0, 0, 0, 2, None]):
            await world.clock.sleep(3 * PERIOD_SECONDS)
            return {stage for stage, count in enumerate(world.counts()) if count}

    assert run(moves(5)) == {0, 2}, "stage 1 is lost, until somebody has a checkpoint"
    assert run(moves(0)) == {0, 1, 2}, "nothing was learnt yet"
    (tmp_path / "stage-1-of-3.round-5.safetensors").touch()
    assert run(moves(5, tmp_path)) == {0, 1, 2}

    def broken(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(file, "names", broken)
    assert run(moves(5, tmp_path)) == {0, 2}, "and it goes on all the same"


@in_virtual_time
async def test_no_dht_no_moves_and_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world(monkeypatch)
    async with _living(world, [0, 0, 0, 1, 2, 2]):
        world.store.is_gone = True
        await world.clock.sleep(3 * PERIOD_SECONDS)
        assert world.moves == []
        world.store.is_gone = False
        await world.clock.sleep(2 * PERIOD_SECONDS)
        assert [target for _, _, target in world.moves] == [1]


@in_virtual_time
async def test_a_stage_that_could_not_be_entered_is_left_alone_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = _world(monkeypatch)
    peer = world.peers[0]

    async def fail() -> None:
        while True:
            target = await peer.rebalancer.next_move((Block(0),), dict)
            world.moves.append((world.clock.monotonic(), 0, target[0].stage))
            await peer.rebalancer.gave_up(target, before=(Block(0),))
            assert [claim.state for claim in await peer.directory.claims()] == [ClaimState.WITHDRAWN]

    async with asyncio.TaskGroup() as tasks:
        for other, stage in zip(world.peers[:6], (0, 0, 0, 1, 2, 2), strict=True):
            other.stage = stage
            other.tasks = [tasks.create_task(other.keep_announced())]
        failing = tasks.create_task(fail())
        await world.clock.sleep(3600)
        failing.cancel()
        for other in world.peers:
            other.kill()
    times = [at for at, _, _ in world.moves]
    assert 4 <= len(times) <= 7
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[-1] > 4 * gaps[0]


@in_virtual_time
async def test_a_claim_that_cannot_be_settled_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the peer would count at the other stage for ever, and never move."""
    world = _world(monkeypatch)
    peer = world.peers[0]
    async with asyncio.TaskGroup() as tasks:
        for other, stage in zip(world.peers[:6], (0, 0, 0, 1, 2, 2), strict=True):
            other.stage = stage
            other.tasks = [tasks.create_task(other.keep_announced())]
        peer.tasks.append(tasks.create_task(peer.claim.keep()))
        moving = tasks.create_task(peer.rebalancer.next_move((Block(0),), dict))
        async with asyncio.timeout(3600):
            while not peer.claim.span:
                await world.clock.sleep(0.1)
            world.store.is_gone = True
            while peer.claim.span:
                await world.clock.sleep(0.1)
            await world.clock.sleep(30.0)
            world.store.is_gone = False
            assert await moving == (Block(1),)
        for other in world.peers:
            other.kill()


@in_virtual_time
async def test_a_newcomer_takes_no_stage_that_does_not_fit() -> None:
    world = World()
    assert await Peer(world, 11, spans=[range(2, 3)]).rebalancer.choose_span() == (Block(2),)
    with pytest.raises(Fatal, match="nobody holds any stage of this run that fits into this machine's memory any more"):
        await Peer(world, 12, spans=[]).rebalancer.choose_span()


@in_virtual_time
async def test_a_newcomer_that_can_enter_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(round_number=3)
    leaving, newcomer = world.peers[:2]
    leaving.stage, leaving.state = 0, PeerState.LEAVING
    await leaving.announce()
    with pytest.raises(Fatal, match="nobody holds any stage of this run any more"):
        await newcomer.rebalancer.choose_span()


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ((0, 2), "it came back without the state, and no other peer and no checkpoint (--resume DIR) has it"),
        ((0, 1, 1), "stage 2 needs a peer more"),
    ],
    ids=["lost", "not lost"],
)
def test_a_peer_that_was_killed_and_is_back_says_why_it_takes_another_stage(
    others: Sequence[int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record at its former stage has not expired yet."""

    async def scene() -> int:
        world = World()
        for peer, stage in zip(world.peers, (1, *others), strict=False):
            # Nothing was learnt yet where a stage without a peer can be entered.
            peer.stage, peer.round = stage, 3 if 1 not in others else 0
            await peer.announce()
        return (await world.peers[0].rebalancer.choose_span())[0].stage

    caplog.set_level("INFO")
    stage = run(scene())
    assert caplog.messages[-1] == (
        f"chose stage {stage} of 0 to 2, and not stage 1, at which this peer was before: {reason}"
    )
