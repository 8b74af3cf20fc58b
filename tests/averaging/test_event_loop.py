"""Vectors of several MB pass through averaging, and the event loop touches none of them."""

import asyncio
import dataclasses
from collections.abc import Collection
from typing import cast

import pytest
import torch

from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.wire.transport import Transport, contact_of
from swarm.compression.codec import Buffer
from swarm.config import ModelConfig
from swarm.machine.clock import SystemClock
from swarm.model.stages import shared_parameters
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Contribution, RoundResult, Snapshot, known
from swarm.types import PeerRecord
from tests.averaging.doubles import make_context, record, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.averaging.nodes import PATIENT, Node

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


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param("fp32", marks=pytest.mark.slow),
        pytest.param("int8", marks=pytest.mark.slow),
        pytest.param("int4", marks=pytest.mark.slow),
        "topk",
    ],
)
async def test_rounds_and_a_download_touch_no_large_tensor_on_the_loop(codec: str) -> None:
    """There are two rounds; the second one has residuals of the first. Then a third member joins, and the parts change
    their owners."""
    config, directory = make_config("diloco", microbatches=4, codec=codec), list[PeerRecord]()
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


class _Line:
    """A transport to the other holder of the blocks."""

    def __init__(self) -> None:
        self.other: TiedParameters

    async def shared(
        self, peer: PeerRecord, request: pb.SharedRequest, *, reply_bytes: int, timeout_seconds: float
    ) -> Buffer:
        return self.other.answer(request)


@pytest.mark.parametrize("codec", ["fp32", "topk"])
async def test_a_large_tied_parameter_is_summed_beside_the_loop(codec: str) -> None:
    config = make_config(stages=2, codec=codec)
    model = ModelConfig(num_layers=4, d_model=64, num_heads=2, vocab_size=8192, tied_embeddings=True)
    config = dataclasses.replace(config, model=model)
    (block,) = shared_parameters(config)
    lines = [_Line(), _Line()]
    holders = [
        TiedParameters(
            dataclasses.replace(
                make_context(record(stage, stage), config=config, timing=PATIENT),
                transport=cast("Transport", lines[stage]),
                clock=SystemClock(),
            )
        )
        for stage in range(2)
    ]
    averages = await asyncio.to_thread(lambda: [torch.ones(block.shape), torch.full(block.shape, 2.0)])
    partners = []
    for stage, average in enumerate(averages):
        lines[stage].other = holders[1 - stage]
        digest = await holders[stage].offer(0, str(stage), {block.name: average}, config.averaging)
        partners.append(pb.Partner(stage=stage, digest=digest, contact=contact_of(record(stage))))
    for holder in holders:
        assert await holder.squared_norm_of_sum(0, partners, config.averaging) == pytest.approx(
            9.0 * averages[0].numel()
        )
        summed = (await holder.sum(0, partners, config.averaging))[block.name]
        assert await asyncio.to_thread(torch.equal, summed, torch.tensor(3.0).expand(block.shape))
