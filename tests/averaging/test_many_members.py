"""Dozens of members that average in groups while some of them die and freeze: each microbatch counts once."""

import asyncio
import dataclasses
import random
from collections.abc import Collection

import pytest
import torch

from swarm.training.round_member import Contribution, RoundResult
from tests.averaging.doubles import Network, Peer, peer_id, until
from tests.averaging.fake_stage import MICROBATCH, FakeStage
from tests.averaging.test_groups import grouped
from tests.support.virtual_time import in_virtual_time

MOST_MICROBATCHES, NUM_FAULTS = 8192, 3


class CountingStage(FakeStage):
    """A stage in which the gradient of a microbatch is 1 at its own place, so that a sum tells how often each one
    counts. As DiLoCo does, it keeps what it learnt after the contribution that a result holds."""

    def __init__(self, lineage: str = "00") -> None:
        super().__init__(lineage)
        self.anchor = torch.zeros(MOST_MICROBATCHES)
        self.learnt: set[int] = set()
        self.counts = torch.zeros(MOST_MICROBATCHES)
        """How often each microbatch counts in the results that it applied."""
        self._closings: list[frozenset[int]] = []

    def learn(self, *indices: int) -> None:
        self.learnt.update(indices)
        super().learn(*indices)

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        contribution = await super().freeze(round_number, drop=drop)
        mean = torch.zeros(MOST_MICROBATCHES)
        mean[[*contribution.committed]] = 1 / max(1, len(contribution.committed))
        self._closings.append(contribution.committed)
        return dataclasses.replace(contribution, tensors={"mean": mean}, closing=len(self._closings) - 1)

    async def apply(self, result: RoundResult) -> "asyncio.Future[str]":
        mean = result.tensors["mean"]
        self.counts = self.counts + mean * (result.num_samples / MICROBATCH)
        given = self._closings[-1 if result.closing is None else result.closing] if result.contributed else ()
        kept = self.indices - {*given}
        halves = {"b": mean[: MOST_MICROBATCHES // 2], "a": mean[MOST_MICROBATCHES // 2 :]}
        digest = await super().apply(dataclasses.replace(result, tensors=halves))
        self.indices, self._closings = kept, []
        return digest


class Churn:
    """A stage whose members learn all the time, while some die or freeze in the middle of an exchange."""

    def __init__(self, seed: int, *, num_members: int, size: int) -> None:
        self.random = random.Random(seed)
        self.network = Network(grouped(size, microbatches=num_members), CountingStage)
        self.network.before = self.disturb
        self.num_deaths = self.num_freezes = 0
        self._frozen: int | None = None
        self._next = iter(range(MOST_MICROBATCHES))
        for number in range(num_members):
            self.network.add(number)

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.network.peers.values() if not peer.dead.is_set()]

    async def disturb(self, name: str, source: int, target: int) -> None:
        if self.random.random() < 0.1:
            await asyncio.sleep(0.02 * self.random.random())
        if name in ("Average", "Exchange", "Commit") and self.random.random() < 0.01:
            if self.num_deaths and not self.network.peers[peer_id(target)].dead.is_set():
                self.num_deaths -= 1
                self.network.kill(target)
            elif self.num_freezes and self._frozen is None:
                self.num_freezes -= 1
                self._frozen = target
                self.network.freeze(target)

    def learn(self) -> None:
        for peer in self.alive:
            if peer.thawed.is_set():
                peer.stage.learn(next(self._next))

    async def run(self) -> None:
        """Let members learn until all faults have happened, and then once more until all are at the same round."""
        self.num_deaths = self.num_freezes = NUM_FAULTS
        rounds = None
        async with asyncio.timeout(120.0):
            while rounds is None or min(peer.stage.round for peer in self.alive) < rounds:
                self.learn()
                await asyncio.sleep(0.4 + 0.3 * self.random.random())
                if self._frozen is not None:
                    self.network.thaw(self._frozen)
                    self._frozen = None
                elif rounds is None and not (self.num_deaths or self.num_freezes):
                    rounds = max(peer.stage.round for peer in self.alive) + 2
        await until(lambda: len({(peer.stage.round, peer.stage.lineage) for peer in self.alive}) == 1, 20.0)
        await self.network.stop()


async def each_counts_once(seed: int, *, num_members: int, size: int) -> None:
    churn = Churn(seed, num_members=num_members, size=size)
    await churn.run()
    members = [peer.stage for peer in churn.alive if isinstance(peer.stage, CountingStage)]
    assert len(members) == num_members - NUM_FAULTS
    assert len({stage.digest for stage in members}) == 1
    assert not any(stage.num_installs for stage in members), "a member gets a result that did not reach it"
    counts = next(stage.counts for stage in members)
    torch.testing.assert_close(counts, counts.round(), rtol=0.0, atol=1e-3)
    assert float(counts.max()) < 1.5, "nothing counts twice"
    for stage in members:
        counted = {index for index in stage.learnt if counts[index] > 0.5}
        assert counted == stage.learnt - stage.indices, "nothing of a living member is missing"


@in_virtual_time
async def test_each_microbatch_counts_once_while_members_die_and_freeze() -> None:
    await each_counts_once(0, num_members=10, size=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_members", "size"), [(32, 8), (20, 3), (12, 2)])
@in_virtual_time
async def test_each_microbatch_counts_once_in_groups_of_any_size(num_members: int, size: int, seed: int) -> None:
    await each_counts_once(seed, num_members=num_members, size=size)
