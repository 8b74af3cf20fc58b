"""Blocks that one process serves commit together without a network between them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch

from swarm.averaging.averager import Averager
from swarm.averaging.servicer import Handlers
from swarm.config import RunConfig
from swarm.types import Block
from tests.averaging.doubles import make_context, record, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.averaging.vectors.test_shared import SharingStage, tied
from tests.support.virtual_time import in_virtual_time


@asynccontextmanager
async def _process(config: RunConfig, members: dict[Block, FakeStage]) -> AsyncIterator[dict[Block, Averager]]:
    """Peer 1 with these blocks, and no other peer. It has no network."""
    averagers: dict[Block, Averager] = {}

    def own_block(block: Block) -> Handlers | None:
        return averagers[block].handlers if block in averagers else None

    for block, member in members.items():
        context = make_context(record(1, block.stage), lambda other: [record(1, other.stage)], config=config)
        nobody: Any = SimpleNamespace(is_connected=lambda peer: False)
        averagers[block] = Averager(dataclasses.replace(context, transport=nobody, own_block=own_block), member)
        member.averager = averagers[block]
    running = [asyncio.create_task(averager.run()) for averager in averagers.values()]
    try:
        yield averagers
    finally:
        for task in running:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@in_virtual_time
async def test_blocks_of_one_process_wait_for_each_other_at_the_barrier() -> None:
    members = {Block(0): FakeStage(), Block(1): FakeStage()}
    async with _process(make_config(stages=2), members):
        first, second = members.values()
        first.learn(*range(6))
        second.learn(*range(5))
        await until(lambda: first.closed)
        await asyncio.sleep(2.0)
        assert (first.round, second.round) == (0, 0)
        second.learn(5)
        await until(lambda: first.round == second.round == 1)
        totals = {member.results[0].total_squared_norm for member in members.values()}
        assert totals == {sum(member.results[0].squared_norm for member in members.values())}


@in_virtual_time
async def test_they_give_each_other_their_averages_of_tied_parameters() -> None:
    first, second = SharingStage(0, "00"), SharingStage(1, "00")
    async with _process(tied(), {Block(0): first, Block(1): second}):
        for stage in (first, second):
            stage.learn(*range(4))
        await until(lambda: first.round == second.round == 1)
        assert torch.equal(first.shared, second.shared)
        assert first.shared.abs().sum() > 0
