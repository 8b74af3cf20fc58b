"""Two stages that have tied parameters: tied embeddings."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from swarm.averaging.vectors.shared import TiedParameters
from swarm.config import ModelConfig, RunConfig
from swarm.errors import PeerUnavailable
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Contribution, RoundResult
from swarm.types import Block
from tests.averaging.doubles import QUICK, Network, make_context, network_of, peer_id, record, until
from tests.averaging.fake_stage import FakeStage, gradient, make_config
from tests.support.virtual_time import in_virtual_time

SHARED = "embedding.weight"
SHAPE = (3, 8)


def role(stage_number: int, index: int) -> torch.Tensor:
    """The gradient of a microbatch for the tied parameters at one of its stages."""
    generator = np.random.default_rng((stage_number, index))
    return torch.from_numpy(generator.standard_normal(SHAPE).astype(np.float32))


class SharingStage(FakeStage):
    """A stage with a part of its own and the tied parameters."""

    def __init__(self, stage_number: int, lineage: str) -> None:
        super().__init__(lineage)
        self.stage_number = stage_number
        self.shared = torch.zeros(SHAPE)

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        contribution = await super().freeze(round_number, drop=drop)
        kept = sorted(contribution.committed)
        total = sum((role(self.stage_number, i) for i in kept), torch.zeros(SHAPE))
        tensors = {**contribution.tensors, SHARED: total / max(1, len(kept))}
        return dataclasses.replace(contribution, tensors=tensors)

    async def apply(self, result: RoundResult) -> asyncio.Future[str]:
        self.shared = self.shared - result.tensors[SHARED]
        return await super().apply(result)


def tied(setting: str = "synchronous", codec: str = "fp32", **averaging: int) -> RunConfig:
    config = make_config(setting, microbatches=4, stages=2, codec=codec)
    model = ModelConfig(num_layers=4, d_model=SHAPE[1], num_heads=4, vocab_size=SHAPE[0], tied_embeddings=True)
    return dataclasses.replace(
        config, model=model, averaging=dataclasses.replace(config.averaging, **averaging)  # type: ignore[arg-type]  # counts
    )  # fmt: skip


@asynccontextmanager
async def sharing_network(config: RunConfig) -> AsyncIterator[Network]:
    """Peers 1 and 2 at stage 0, 3 and 4 at stage 1."""
    async with network_of(config) as network:
        network.make_stage = SharingStage
        for number in (1, 2, 3, 4):
            network.add(number, (number - 1) // 2)
        yield network


def stages_of(network: Network, *numbers: int) -> list[SharingStage]:
    stages = [network.peers[peer_id(number)].stage for number in numbers]
    assert all(isinstance(stage, SharingStage) for stage in stages)
    return stages  # type: ignore[return-value]  # checked


def learn(network: Network, round_number: int, numbers: Collection[int] = (1, 2, 3, 4)) -> None:
    """Let every stage learn four microbatches: two at each peer, or all four at the only peer that is left."""
    for group in ({1, 2}, {3, 4}):
        alive = sorted(group & set(numbers))
        for index in range(4 * round_number, 4 * round_number + 4):
            network.peers[peer_id(alive[index % len(alive)])].stage.learn(index)


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 1e-6), ("fp16", 5e-3), ("int8", 5e-2), ("topk", 2e-2)])
@in_virtual_time
async def test_holders_apply_the_sum_over_the_roles(setting: str, codec: str, tolerance: float) -> None:
    config = tied(setting, codec, clip_to_median=0)
    async with sharing_network(config) as network:
        stages = stages_of(network, 1, 2, 3, 4)
        expected = torch.zeros(SHAPE, dtype=torch.float64)
        for round_number in range(2):
            learn(network, round_number)
            await until(lambda: all(stage.round == round_number + 1 for stage in stages))  # noqa: B023 - awaited at once
            indices = range(4 * round_number, 4 * round_number + 4)
            for stage_number in (0, 1):
                expected -= sum(role(stage_number, index).double() for index in indices) / 4
        for stage in stages:
            assert torch.equal(stage.shared, stages[0].shared), "the same bits at both stages"
        if codec != "topk":  # topk leaves most of such a small vector for later rounds.
            np.testing.assert_allclose(stages[0].shared.numpy(), expected.numpy(), atol=tolerance)


@pytest.mark.parametrize("victim", [None, 2, 9])
@in_virtual_time
async def test_holders_that_average_in_groups_apply_the_same_sum(victim: int | None) -> None:
    async with network_of(tied("diloco", clip_to_median=0, group_size=2)) as network:
        network.make_stage = SharingStage
        for number in range(1, 11):
            network.add(number, (number - 1) // 5)
        stages = stages_of(network, *range(1, 11))

        async def die(name: str, source: int, target: int) -> None:
            if name == "Average" and target == victim:
                network.kill(target)

        network.before = die
        for index, stage in enumerate(stages):
            stage.learn(index % 5)
        alive = [stage for number, stage in enumerate(stages, start=1) if number != victim]
        await until(lambda: all(stage.round == 1 for stage in alive))
        assert all(torch.equal(stage.shared, alive[0].shared) for stage in alive), "the same bits at both stages"
        if victim is None:
            expected = -sum(role(number, index).double() for number in (0, 1) for index in range(5)) / 5
            np.testing.assert_allclose(alive[0].shared.numpy(), torch.as_tensor(expected).numpy(), atol=1e-6)


@in_virtual_time
async def test_the_whole_norm_counts_tied_parameters_once() -> None:
    async with sharing_network(tied()) as network:
        stages = stages_of(network, 1, 2, 3, 4)
        learn(network, 0)
        await until(lambda: all(stage.round == 1 for stage in stages))
        own = torch.stack([gradient(index).double() for index in range(4)]).mean(0)
        shared = sum(torch.stack([role(number, index).double() for index in range(4)]).mean(0) for number in (0, 1))
        expected = 2 * float(own.square().sum()) + float(torch.as_tensor(shared).square().sum())
        totals = {stage.results[0].total_squared_norm for stage in stages}
        assert len(totals) == 1, "the same bits everywhere"
        assert totals.pop() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("victim", [1, 3])
@in_virtual_time
async def test_a_leader_that_dies_after_deciding_holds_nobody_up(victim: int) -> None:
    """The other member of its stage has the average too, and both stages end with the same tied parameter."""
    async with sharing_network(tied()) as network:
        stages = stages_of(network, 1, 2, 3, 4)

        async def die(name: str, source: int, target: int) -> None:
            if name == "Commit" and source == victim:
                network.kill(victim)

        network.before = die
        learn(network, 0)
        alive = [stage for number, stage in zip((1, 2, 3, 4), stages, strict=True) if number != victim]
        await until(lambda: all(stage.round == 1 for stage in alive))
        assert all(torch.equal(stage.shared, alive[0].shared) for stage in alive)


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@in_virtual_time
async def test_a_leader_that_dies_while_a_member_encodes_tied_parameters_does_not_end_that_member(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That member is the last one of its stage, so no other could give it its own stage's average."""
    async with sharing_network(tied(setting)) as network:
        num_encoding, is_killed, honest = 0, False, TiedParameters.offer

        async def encode(own: TiedParameters, *arguments: Any) -> str:
            nonlocal num_encoding
            is_at_second_stage = own.partners(0) == {Block(0)}
            if is_at_second_stage and not is_killed:
                num_encoding += 1
                await asyncio.Event().wait()
            return await honest(own, *arguments)

        monkeypatch.setattr(TiedParameters, "offer", encode)
        learn(network, 0)
        await until(lambda: num_encoding == 2)
        is_killed = True
        network.kill(3)
        await asyncio.sleep(0.5)
        learn(network, 0, (1, 2, 4))
        alive = stages_of(network, 1, 2, 4)
        await until(lambda: all(stage.round == 1 for stage in alive))
        assert all(torch.equal(stage.shared, alive[0].shared) for stage in alive)


@in_virtual_time
async def test_a_stage_that_lost_its_samples_does_not_hold_up_for_good_who_shares_a_block_with_it() -> None:
    """The waiting stage lets only the samples of one round through, which may be too few for the other stage's round,
    and more of them one after the other while it waits."""
    async with sharing_network(tied("diloco")) as network:
        stages = stages_of(network, 1, 2, 3, 4)
        learn(network, 0)
        await until(lambda: all(stage.round == 1 for stage in stages))
        network.kill(3)
        for index in (4, 5, 6, 7):
            stages[0].learn(index)
        await asyncio.sleep(QUICK.awaited_seconds)
        assert [stage.round for stage in stages[:2]] == [1, 1], "the other stage has nothing to average"
        stages[0].on_training_on = lambda: stages[3].learn(7)
        alive = [stages[0], stages[1], stages[3]]
        await until(lambda: all(stage.round == 2 for stage in alive))
        assert all(torch.equal(stage.shared, alive[0].shared) for stage in alive)


@in_virtual_time
async def test_an_average_beyond_all_bounds_is_not_believed_and_another_holder_asked() -> None:
    async with sharing_network(tied()) as network:
        stages = stages_of(network, 1, 2, 3, 4)
        liar, num_lies = network.peers[peer_id(3)].averager.handlers, 0
        honest = liar.shared

        async def lie(request: pb.SharedRequest) -> bytes:
            nonlocal num_lies
            num_lies += 1
            num_bytes = len(bytes(await honest(request)))
            return np.full(num_bytes // 4, 1e30, dtype=np.float32).tobytes()

        liar.shared = lie  # type: ignore[method-assign]  # a member that means harm
        learn(network, 0)
        await until(lambda: all(stage.round == 1 for stage in stages))
        assert num_lies > 0
        assert all(float(stage.shared.abs().max()) < 10 for stage in stages)


@pytest.mark.parametrize(
    "honest_id", [4, pytest.param(None, marks=pytest.mark.slow)], ids=["beside an honest one", "alone"]
)
@in_virtual_time
async def test_who_answers_for_the_other_stage_gives_all_members_the_same_average_or_none(
    honest_id: int | None,
) -> None:
    """Here it gives each member other numbers, each of them ordinary. Who gets the right ones nowhere catches up."""
    async with sharing_network(tied()) as network:
        stages = stages_of(network, 1, 2, 3, 4)
        if honest_id is None:
            network.kill(4)
        liar, num_lies = network.peers[peer_id(3)].averager.handlers, 0
        honest = liar.shared

        async def lie(request: pb.SharedRequest) -> bytes:
            nonlocal num_lies
            encoded = bytes(await honest(request))
            if request.peer_id == peer_id(1):
                return encoded
            num_lies += 1
            return (np.frombuffer(encoded, dtype=np.float32) + np.float32(0.5)).tobytes()

        liar.shared = lie  # type: ignore[method-assign]  # a member that means harm
        learn(network, 0, [1, 2, 3, *([honest_id] if honest_id else [])])
        alive = stages[:3]
        await until(lambda: all(stage.round == 1 for stage in alive), 200.0)
        assert num_lies > 0
        assert alive[0].lineage == alive[1].lineage
        assert alive[1].num_installs == (honest_id is None)
        # The doubles' snapshots have no tied parameter.
        applied = [stage.shared for stage in alive if stage.results]
        assert all(torch.equal(shared, applied[0]) for shared in applied)


def test_fragments_share_the_block_in_its_own_rounds() -> None:
    """Two fragments: the tied parameters is due every other round, and only then do the stages wait for each other."""
    shared = TiedParameters(make_context(record(1), config=tied("diloco", num_fragments=2)))
    assert [shared.is_due(number) for number in range(4)] == [True, False, True, False]
    assert shared.partners(0) == {Block(1)}
    assert shared.partners(1) == set()


@pytest.mark.parametrize("since", ["Barrier", "Commit"])
@in_virtual_time
async def test_a_decided_round_is_committed_once_the_other_stages_average_is_to_be_had(
    since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a line stalls, for example, no peer ends because of it, and no peer has to wait until another member calls
    it."""
    async with sharing_network(tied()) as network:
        stages, num_refused, is_cut_off = stages_of(network, 1, 2, 3, 4), 0, False

        async def cut_off(name: str, source: int, target: int) -> None:
            nonlocal is_cut_off
            is_cut_off = is_cut_off or (name == since and num_refused == 0)

        network.before = cut_off
        honest = TiedParameters.sum

        async def ask(*arguments: Any) -> Any:
            nonlocal num_refused
            if is_cut_off:
                num_refused += 1
                raise PeerUnavailable("the line stands still")
            return await honest(*arguments)

        monkeypatch.setattr(TiedParameters, "sum", ask)
        learn(network, 0)
        await until(lambda: num_refused >= 2)
        await asyncio.sleep(0.3)
        is_cut_off = False
        await until(lambda: all(stage.round == 1 for stage in stages))
        applied = [stage.shared for stage in stages if stage.results]
        assert len(applied) >= 3, "one may have downloaded what it could not put together"
        assert all(torch.equal(shared, applied[0]) for shared in applied)
