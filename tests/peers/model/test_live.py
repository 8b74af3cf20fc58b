"""The weights of one round from the peers of every stage, some of which lie, are behind, or go on meanwhile."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from peers.model.live import QUIET_SECONDS, LiveModel
from peers.shared.network import KnownPeers, Membership
from swarm.averaging.wire.transport import Transport
from swarm.checkpoint import file
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.dht.directory import Directory
from swarm.errors import Fatal, IntegrityError, PeerUnavailable
from swarm.interchange import origin
from swarm.machine.clock import Clock
from swarm.model.stages import parameter_shapes
from swarm.routing.poll import Poll
from swarm.routing.router import Router
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1 import stage_pb2
from swarm.training.round_member import Snapshot
from swarm.types import Block, PeerRecord
from tests.averaging.doubles import peer_id, record
from tests.averaging.holder import Holder, Line
from tests.checkpoint.states import cut
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import LoopClock, in_virtual_time

CONFIG = cut(2)


class StageHolder(Holder):
    """A peer that holds a stage's parameters, the first of which changes with every round, and some optimizer state."""

    def __init__(self, stage: int, clock: Clock) -> None:
        super().__init__(clock)
        generator = torch.Generator().manual_seed(stage)
        shapes = parameter_shapes(CONFIG, stage)
        self.tensors = {f"anchor/{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    async def snapshot(self) -> Snapshot:
        plain = await super().snapshot()
        first = next(iter(self.tensors))
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        tensors[first] += plain.round
        tensors[f"outer/{first.removeprefix('anchor/')}/moment"] = torch.ones(50)
        return Snapshot(
            round=plain.round, run_samples=plain.run_samples, lineage=plain.lineage, tensors=tensors,
            digest=plain.digest,
        )  # fmt: skip


class Known(KnownPeers):
    """Peers whose records are given once."""

    async def look(self, directory: Directory, blocks: Sequence[Block]) -> None:
        pass


class World:
    """Two stages with some holders each, numbered consecutively."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *num_holders: int, rounds: int = 3) -> None:
        self.clock = LoopClock()
        self.stages = [
            [StageHolder(stage, self.clock) for _ in range(number)] for stage, number in enumerate(num_holders)
        ]
        holders = [holder for stage in self.stages for holder in stage]
        self.line = Line({peer_id(number): holder for number, holder in enumerate(holders)})
        numbers = iter(range(len(holders)))
        self.records = [[record(next(numbers), stage) for _ in row] for stage, row in enumerate(self.stages)]
        for stage in range(len(self.stages)):
            for _ in range(rounds):
                self.commit(stage)
        monkeypatch.setattr(Poll, "replies", lambda _, records: self.replies(records))

    async def replies(self, records: Sequence[PeerRecord]) -> list[stage_pb2.DescribeReply]:
        alive = [record for record in records if record.peer_id not in self.line.broken]
        return [stage_pb2.DescribeReply(round=self.line.holders[r.peer_id].standing.round) for r in alive]

    def model(self, config: RunConfig = CONFIG) -> LiveModel:
        member = Membership.enter(config, MemoryStore(self.clock), generate(), self.clock, insecure=True)
        known = Known(Router(self.clock, random.Random(0)))
        for stage, records in enumerate(self.records):
            known.update(Block(stage), records)
        # The line is used for downloads only.
        return LiveModel(dataclasses.replace(member, known=known), transport=cast("Transport", self.line))

    def commit(self, stage: int) -> None:
        """Let a stage's holders commit a round."""
        for holder in self.stages[stage]:
            holder.commit()


def _is_exact(world: World, folder: Path, round_number: int) -> None:
    """Assert that the files have the weights of the stages at that round, and that an export accepts them."""
    found = origin.from_checkpoints(folder, None)
    assert found.card.round == round_number
    for stage in world.stages:
        first, *others = stage[0].tensors
        expected = {first: stage[0].tensors[first] + round_number, **{name: stage[0].tensors[name] for name in others}}
        loaded = found.load({name.removeprefix("anchor/") for name in expected})
        assert all(torch.equal(loaded[name.removeprefix("anchor/")], tensor) for name, tensor in expected.items())


@in_virtual_time
async def test_all_stages_come_and_nothing_but_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("swarm.averaging.donor.SEGMENT_BYTES", 512)
    world = World(monkeypatch, 2, 3)
    assert await world.model().write_checkpoints(tmp_path) == 3
    _is_exact(world, tmp_path, 3)
    assert len(file.names(tmp_path)) == 2
    # Each byte is sent once, in segments. Optimizer state is not sent.
    weights = sum(t.nbytes for stage in world.stages for t in stage[0].tensors.values())
    assert weights <= sum(world.line.num_bytes.values()) < weights + 2 * 512
    assert "stage 0 of 0 to 1 is here" in caplog.text


@in_virtual_time
async def test_a_round_that_one_peer_says_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2, 3)

    async def answers(_: Poll, records: Sequence[PeerRecord]) -> list[stage_pb2.DescribeReply]:
        replies = await world.replies(records)
        return [*replies[:-1], stage_pb2.DescribeReply(round=1 << 47)] if len(replies) == 3 else replies

    monkeypatch.setattr(Poll, "replies", answers)
    assert await world.model().write_checkpoints(tmp_path) == 3
    _is_exact(world, tmp_path, 3)


@in_virtual_time
async def test_a_liar_among_three_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1, 3)
    liar = world.stages[1][2]
    liar.tensors = {name: tensor + 1.0 for name, tensor in liar.tensors.items()}
    await world.model().write_checkpoints(tmp_path)
    _is_exact(world, tmp_path, 3)


@in_virtual_time
async def test_a_liar_beside_one_honest_peer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1, 2)
    world.stages[1][0].tensors = {name: tensor + 1.0 for name, tensor in world.stages[1][0].tensors.items()}
    with pytest.raises(IntegrityError, match="of 2 peers of stage 1 only 1 have the same weights at round 3"):
        await world.model().write_checkpoints(tmp_path)
    assert not file.names(tmp_path)


@in_virtual_time
async def test_a_donor_that_sends_other_bytes_than_it_offered_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, 1, 2)

    def tamper(donor: str, reply: pb.DownloadReply) -> None:
        if donor == peer_id(1) and reply.data:
            reply.data = bytes(len(reply.data))

    world.line.tamper = tamper
    await world.model().write_checkpoints(tmp_path)
    _is_exact(world, tmp_path, 3)


@in_virtual_time
async def test_a_swarm_that_trains_gives_one_round_of_all_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of 0.3 s, which the stages commit one after the other."""
    world = World(monkeypatch, 2, 2, rounds=0)
    (tmp_path / "later").mkdir()

    async def train() -> None:
        while True:
            for stage in (0, 1):
                await asyncio.sleep(0.15)
                world.commit(stage)

    async with asyncio.TaskGroup() as tasks:
        training = tasks.create_task(train())
        await asyncio.sleep(1.0)
        chosen = await world.model().write_checkpoints(tmp_path)
        later = await world.model().write_checkpoints(tmp_path / "later", chosen + 20)
        training.cancel()
    _is_exact(world, tmp_path, chosen)
    assert later == chosen + 20
    _is_exact(world, tmp_path / "later", later)


@in_virtual_time
async def test_a_stage_that_is_behind_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DiLoCo a stage may be behind. The others keep what they had, far longer than for a newcomer."""
    world = World(monkeypatch, 1, 1)
    for _ in range(2):
        world.commit(0)

    async def train() -> None:
        for _ in range(2):
            await asyncio.sleep(90.0)
            world.commit(1)
            world.commit(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(train())
        assert await world.model().write_checkpoints(tmp_path) == 5
    _is_exact(world, tmp_path, 5)


@in_virtual_time
async def test_what_cannot_come_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(monkeypatch, 1, 1)
    with pytest.raises(Fatal, match="the swarm is at round 3 and keeps no earlier one: export round 2 from"):
        await world.model().write_checkpoints(tmp_path, 2)
    caplog.set_level("INFO")
    began = world.clock.monotonic()
    with pytest.raises(PeerUnavailable, match="stays at round 3: nobody trains"):
        await world.model().write_checkpoints(tmp_path, 4)
    assert "the swarm is at round 3: waiting until it is at 4" in caplog.text
    assert world.clock.monotonic() - began < 1.1 * QUIET_SECONDS
    world.line.broken.add(peer_id(1))
    with pytest.raises(PeerUnavailable, match="no peer of stage 1 answers"):
        await world.model().write_checkpoints(tmp_path)
