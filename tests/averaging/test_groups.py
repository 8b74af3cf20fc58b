"""Rounds of more members than a group has: groups average, then these, and all members get one result."""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from swarm.config import RunConfig
from swarm.errors import PeerUnavailable
from swarm.rpc.v1 import averaging_pb2 as pb
from tests.averaging.doubles import Network, broken, network_of, peer_id, stages, until
from tests.averaging.fake_stage import MICROBATCH, FakeStage, make_config
from tests.averaging.outcomes import expected_mean, result_vector
from tests.support.virtual_time import in_virtual_time


def grouped(size: int, *, microbatches: int, codec: str = "fp32") -> RunConfig:
    config = make_config("diloco", microbatches=microbatches, codec=codec)
    averaging = dataclasses.replace(config.averaging, group_size=size, clip_to_median=0)
    return dataclasses.replace(config, averaging=averaging)


@pytest.mark.parametrize(
    ("size", "num_members", "codec"),
    [(3, 3, "fp32"), (3, 4, "fp32"), (4, 9, "fp16"), (2, 9, "bf16"), (3, 10, "fp32"), (3, 10, "bf16")],
)
@in_virtual_time
async def test_all_members_apply_the_same_bits_of_the_weighted_mean(size: int, num_members: int, codec: str) -> None:
    async with network_of(grouped(size, microbatches=2 * num_members, codec=codec), *range(num_members)) as network:
        members = stages(network, *range(num_members))
        for index in range(2 * num_members):  # The shares are uneven, and one member has none.
            members[min(index // 3, num_members - 1)].learn(index)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert len({stage.lineage for stage in members}) == len({stage.digest for stage in members}) == 1
        tolerance = {"fp32": 1e-6, "fp16": 3e-3, "bf16": 3e-2}[codec]
        expected = expected_mean(*range(2 * num_members))
        np.testing.assert_allclose(result_vector(members[0]), expected, atol=tolerance)
        for stage in members:
            assert stage.num_installs == 0
            assert [len(result.members) for result in stage.results] == [num_members]
            assert stage.results[0].num_samples == 2 * num_members * MICROBATCH


NUM_MEMBERS, SIZE = 9, 3
STEPS = {"in its group": "is_part", "among groups": "member_ids", "handing down": "handed_down"}


class Grouped(Network):
    """Nine members in groups of three. Notes who was asked for which exchange, and kills members in the middle."""

    def __init__(self) -> None:
        super().__init__(grouped(SIZE, microbatches=2 * NUM_MEMBERS))
        self.asked: dict[str, list[int]] = {field: [] for field in STEPS.values()}
        """The members that were asked for an exchange of each kind."""
        self.sizes: list[int] = []
        self.dies_in: str | None = None
        """In which exchange one member is killed: the first but the leader that is asked for it, or `victim`."""
        self.victim: int | None = None
        self.killed: list[int] = []
        self.num_decided = 0
        """How many members have prepared the result of the last exchange, without the leader."""
        for number in range(NUM_MEMBERS):
            self.join(number)

    def join(self, number: int) -> FakeStage:
        peer = self.add(number)

        async def average(request: pb.AverageRequest) -> pb.AverageReply:
            field = next(name for name in STEPS.values() if _has(request, name))
            self.asked[field].append(number)
            self.sizes.append(len(request.shares))
            if field == self.dies_in and not self.killed and self.victim in (None, number):
                self.killed.append(number)
                self.kill(number)
                await asyncio.Event().wait()
            reply = await peer.averager.handlers.participant.average(request)
            self.num_decided += field == STEPS["among groups"] and reply.HasField("prepared")
            return reply

        peer.instead["Average"] = average
        return peer.stage

    @property
    def alive(self) -> list[FakeStage]:
        return [peer.stage for peer in self.peers.values() if not peer.dead.is_set()]

    def learn(self, round_number: int) -> None:
        """Let each living member learn two microbatches, so that the stage has all that a round needs."""
        first = 1000 * round_number
        for number, peer in enumerate(self.peers.values()):
            if not peer.dead.is_set():
                peer.stage.learn(first + 2 * number, first + 2 * number + 1)

    async def committed(self, round_number: int) -> None:
        await until(lambda: all(stage.round > round_number for stage in self.alive), seconds=60.0)
        assert len({stage.lineage for stage in self.alive}) == len({stage.digest for stage in self.alive}) == 1


def _has(request: pb.AverageRequest, field: str) -> bool:
    return request.HasField("handed_down") if field == "handed_down" else bool(getattr(request, field))


@in_virtual_time
async def test_groups_change_and_none_is_larger_than_it_may_be() -> None:
    async with Grouped() as network:
        representatives = list[Sequence[int]]()
        for number in range(3):
            network.asked["member_ids"].clear()
            network.learn(number)
            await network.committed(number)
            representatives.append(sorted(network.asked["member_ids"]))
        assert max(network.sizes) == SIZE
        assert len(set(map(tuple, representatives))) > 1


@pytest.mark.parametrize("victim", [1, 4, 8])
@in_virtual_time
async def test_a_death_in_a_group_leaves_out_that_group_alone_until_the_next_round(victim: int) -> None:
    async with Grouped() as network:
        network.dies_in, network.victim = STEPS["in its group"], victim
        network.learn(0)
        await network.committed(0)
        assert len(network.alive) == NUM_MEMBERS - 1
        result = next(stage.results[0] for stage in network.alive if stage.results)
        assert len(result.members) == NUM_MEMBERS - SIZE
        left_out = [
            peer.stage
            for peer in network.peers.values()
            if not peer.dead.is_set() and peer.record.peer_id not in result.members
        ]
        assert len(left_out) == SIZE - 1
        assert all(len(stage.indices) == 2 for stage in left_out), "what it has learnt counts in the next round"
        network.dies_in = None
        network.learn(1)
        await network.committed(1)
        last = network.alive[0].results[-1]
        assert len(last.members) == NUM_MEMBERS - 1
        assert last.num_samples == 2 * MICROBATCH * (NUM_MEMBERS - 1 + len(left_out))


@pytest.mark.parametrize("victim", [1, 8])
@in_virtual_time
async def test_a_member_that_freezes_in_its_group_costs_no_other_group_its_exchange(victim: int) -> None:
    async with Grouped() as network:

        async def freeze(request: pb.AverageRequest) -> pb.AverageReply:
            network.freeze(victim)
            return pb.AverageReply()

        network.peers[peer_id(victim)].instead["Average"] = freeze
        network.learn(0)
        awake = [peer.stage for peer in network.peers.values() if peer.number != victim]
        await until(lambda: all(stage.round == 1 for stage in awake))
        result = next(stage.results[0] for stage in awake if stage.results)
        assert (len(result.members), result.attempts) == (NUM_MEMBERS - SIZE, 1)


@in_virtual_time
async def test_a_member_that_lives_and_never_answers_is_left_out_once_its_group_has_timed_out_twice() -> None:
    async with Grouped() as network:
        broken(network, 5, "Average", "hang")
        network.learn(0)
        healthy = [peer.stage for peer in network.peers.values() if peer.number != 5]
        # What it holds is waited for, until attempts have gone on without it often enough.
        healthy[0].learn(900, 901)
        await until(lambda: all(stage.round == 1 for stage in healthy), seconds=60.0)
        result = next(stage.results[0] for stage in healthy if stage.results)
        assert peer_id(5) not in result.members
        assert len(result.members) == NUM_MEMBERS - 1


@in_virtual_time
async def test_a_group_counts_all_that_its_members_have_learnt_in_more_than_two_rounds() -> None:
    async with Grouped() as network:
        for number, peer in enumerate(network.peers.values()):
            peer.stage.learn(*range(100 * number, 100 * number + 2 * NUM_MEMBERS))
        await network.committed(0)
        result = network.alive[0].results[0]
        assert result.num_samples == MICROBATCH * 2 * NUM_MEMBERS * NUM_MEMBERS


@in_virtual_time
async def test_a_death_among_groups_fails_the_attempt_and_the_next_one_counts_all_once() -> None:
    async with Grouped() as network:
        network.dies_in = STEPS["among groups"]
        network.learn(0)
        await until(lambda: bool(network.killed))
        await asyncio.sleep(3.0)
        assert all(stage.round == 0 for stage in network.alive)
        network.alive[0].learn(900, 901)  # In place of what the dead one had
        await network.committed(0)
        result = network.alive[0].results[0]
        assert len(result.members) == NUM_MEMBERS - 1
        assert result.num_samples == 2 * MICROBATCH * NUM_MEMBERS


@in_virtual_time
async def test_a_death_in_handing_down_delays_a_group_and_voids_nothing() -> None:
    async with Grouped() as network:
        network.dies_in = STEPS["handing down"]
        network.learn(0)
        await network.committed(0)
        assert len(network.killed) == 1
        result = next(stage.results[0] for stage in network.alive if stage.results)
        assert len(result.members) == NUM_MEMBERS
        assert result.num_samples == 2 * MICROBATCH * NUM_MEMBERS
        assert not any(stage.indices for stage in network.alive), "what is in the result counts no more"
        assert not any(carried for stage in network.alive for carried in stage.carried)
        network.dies_in = None
        network.learn(1)
        network.alive[0].learn(1900, 1901)
        await network.committed(1)


@in_virtual_time
async def test_a_result_that_reaches_few_is_not_committed_and_the_next_attempt_counts_all_once() -> None:
    async with Grouped() as network:
        was_aborted = False

        async def before(name: str, source: int, target: int) -> None:
            nonlocal was_aborted
            was_aborted = was_aborted or name == "Abort"
            is_decided = 0 < network.num_decided == len(network.asked[STEPS["among groups"]])
            if is_decided and name == "Exchange" and not was_aborted:
                raise PeerUnavailable("lost")

        network.before = before
        network.learn(0)
        await network.committed(0)
        assert was_aborted
        for stage in network.alive:
            assert (len(stage.results[0].members), stage.results[0].num_samples) == (
                NUM_MEMBERS,
                2 * MICROBATCH * NUM_MEMBERS,
            )


@pytest.mark.parametrize(("call", "is_held"), [("Average", False), ("Commit", True)])
@in_virtual_time
async def test_the_next_leader_commits_what_most_members_hold(call: str, is_held: bool) -> None:
    async with Grouped() as network:
        leader = 0

        async def before(name: str, source: int, target: int) -> None:
            is_decided = 0 < network.num_decided == len(network.asked[STEPS["among groups"]])
            if is_decided and source == leader and name == call:
                network.kill(leader)
                if not is_held:
                    network.learn(1)
                await asyncio.Event().wait()

        network.before = before
        network.learn(0)
        await network.committed(0)
        assert len(network.alive) == NUM_MEMBERS - 1
        result = next(stage.results[0] for stage in network.alive if stage.results)
        # What the last exchange gave is not decided before it is handed down: the others make the round by themselves.
        assert result.num_samples == MICROBATCH * (2 * NUM_MEMBERS if is_held else 4 * (NUM_MEMBERS - 1))
        assert (peer_id(leader) in result.members) is is_held
        assert not any(stage.indices for stage in network.alive)
