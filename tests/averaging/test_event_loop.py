"""Vectors of several MB pass through averaging, and the event loop touches none of them."""

import asyncio
from collections.abc import Collection

import pytest
import torch

from swarm.training.round_member import Contribution, RoundResult, Snapshot, known
from swarm.types import PeerRecord
from tests.averaging.doubles import until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.averaging.nodes import Node

pytestmark = pytest.mark.usefixtures("guarded")

SIZE = 1 << 21
"""The number of elements: eight times as many as may be touched on the loop."""


class LargeStage(FakeStage):
    """A stage with large tensors, which works on them in other threads, as a real one does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.anchor = torch.zeros(SIZE)
        self._learnt = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        num_samples = 2 * len(self.indices)
        return Contribution(
            tensors={"learnt": self._learnt}, num_samples=num_samples, num_targets=num_samples,
            round_samples=num_samples, committed=frozenset(),
        )  # fmt: skip

    async def apply(self, result: RoundResult) -> asyncio.Future[str]:
        self.anchor = await asyncio.to_thread(torch.sub, self.anchor, result.tensors["learnt"])
        self.run_samples += result.num_samples
        self.lineage, self.round, self.indices = result.lineage, self.round + 1, set()
        return known(await self._digest())

    async def _digest(self) -> str:
        return await asyncio.to_thread(self.digest_of, {"anchor": self.anchor})

    async def snapshot(self) -> Snapshot:
        return Snapshot(
            round=self.round, run_samples=self.run_samples, lineage=self.lineage, tensors={"anchor": self.anchor},
            digest=await self._digest(),
        )  # fmt: skip

    async def install(self, snapshot: Snapshot, *, carry: bool = False) -> None:
        assert await asyncio.to_thread(self.digest_of, snapshot.tensors) == snapshot.digest
        self.round, self.run_samples, self.lineage = snapshot.round, snapshot.run_samples, snapshot.lineage
        self.anchor, self.indices = snapshot.tensors["anchor"], set()


async def test_rounds_and_a_download_touch_no_large_tensor_on_the_loop() -> None:
    """There are two rounds; the second one has residuals of the first. Then a third member joins, and the parts change
    their owners."""
    config, directory = make_config("diloco", microbatches=4, codec="topk"), list[PeerRecord]()
    nodes = await asyncio.to_thread(lambda: [Node(LargeStage(seed)) for seed in range(3)])
    try:
        for number, node in enumerate(nodes, start=1):
            await node.start(number, config, directory)
            directory.append(node.record)
            if number == 1:
                continue
            await until(lambda: len({node.stage.round for node in nodes[:number]}) == 1, 60.0)  # noqa: B023
            for _ in range(2):
                reached = nodes[0].stage.round + 1
                for index in range(4):
                    nodes[index % number].stage.learn(4 * reached + index)
                for node in nodes[:number]:
                    await until(lambda: node.stage.round >= reached, 60.0)  # noqa: B023
        anchors = [node.stage.anchor for node in nodes]
        assert await asyncio.to_thread(lambda: all(torch.equal(anchor, anchors[0]) for anchor in anchors))
    finally:
        for node in nodes:
            if hasattr(node, "task"):
                await node.stop()
