"""Closings that take longer than any call, and members that answer but do nothing."""

import asyncio
import dataclasses
import math
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager

import pytest

from swarm.averaging.agreement.timing import Timing
from swarm.training.round_member import Contribution
from tests.averaging.doubles import QUICK, Network, network_of, peer_id, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.support.virtual_time import in_virtual_time

PATIENCE_SECONDS = 400.0


class SlowStage(FakeStage):
    """A stage that closes slowly."""

    def __init__(self, lineage: str = "00") -> None:
        super().__init__(lineage)
        self.seconds = 0.0
        self.num_closings = self.num_frozen = 0

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        self.num_closings += 1
        await asyncio.sleep(self.seconds)
        self.num_frozen += 1
        return await super().freeze(round_number, drop=drop)


def slow_network(setting: str, *numbers: int, timing: Timing = QUICK) -> AbstractAsyncContextManager[Network]:
    return network_of(make_config(setting), *numbers, timing=timing, stage_type=SlowStage)


def stage(network: Network, number: int) -> SlowStage:
    found = network.peers[peer_id(number)].stage
    assert isinstance(found, SlowStage)
    return found


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@in_virtual_time
async def test_a_closing_of_minutes_is_waited_for(setting: str) -> None:
    """A stage of several GB, or a compute thread with tasks of ten seconds, closes as slowly."""
    async with slow_network(setting, 1, 2, 3, timing=Timing()) as network:
        stage(network, 3).seconds = 200.0
        for number in (1, 2, 3):
            stage(network, number).learn(2 * number - 2, 2 * number - 1)
        await until(lambda: all(stage(network, number).round == 1 for number in (1, 2, 3)), PATIENCE_SECONDS)
        assert {(len(result.members), result.attempts) for n in (1, 2, 3) for result in stage(network, n).results} == {
            (3, 1)
        }
        assert stage(network, 3).num_closings == 1


@in_virtual_time
async def test_a_closing_outlives_its_leader_and_the_next_one_joins_it() -> None:
    async with slow_network("diloco", 1, 2, 3) as network:
        await asyncio.sleep(1.0)
        leader = next(n for n, peer in enumerate(network.peers.values(), start=1) if peer.averager.view().is_leader)
        other, last = {1, 2, 3} - {leader}
        slow = stage(network, last)
        slow.seconds = 30.0
        for number in (1, 2, 3):
            stage(network, number).learn(*range(4 * number, 4 * number + 4))
        began_at = now()
        await until(lambda: slow.num_closings == 1)
        await asyncio.sleep(5.0)
        network.kill(leader)
        alive = [stage(network, number) for number in (other, last)]
        await until(lambda: all(member.round == 1 for member in alive), PATIENCE_SECONDS)
        assert now() - began_at < 35.0
        members = tuple(sorted((peer_id(other), peer_id(last))))
        assert [result.members for member in alive for result in member.results] == [members] * 2
        assert slow.num_closings == 1


@in_virtual_time
async def test_a_closing_that_nobody_wants_any_more_is_opened_again() -> None:
    async with slow_network("synchronous", 1, 2) as network:
        slow = stage(network, 2)
        slow.seconds = 10.0
        stage(network, 1).learn(0, 1, 2)
        slow.learn(3, 4, 5)
        await until(lambda: slow.num_closings == 1)
        network.kill(1)
        await until(lambda: slow.num_frozen == 1, PATIENCE_SECONDS)
        await until(lambda: not slow.closed)
        slow.learn(0, 1, 2)
        await until(lambda: slow.round == 1, PATIENCE_SECONDS)
        assert slow.results[0].num_samples == 12


@in_virtual_time
async def test_a_member_that_does_not_get_on_with_its_closing_is_left_out() -> None:
    async with slow_network("diloco", 1, 2, 3) as network:
        stuck = stage(network, 3)
        stuck.seconds = math.inf
        stuck.quiet_seconds = now
        for number in (1, 2, 3):
            stage(network, number).learn(*range(6 * number, 6 * number + 6))
        others = [stage(network, 1), stage(network, 2)]
        await until(lambda: all(member.round == 1 for member in others), PATIENCE_SECONDS)
        assert now() < 10.0
        assert {result.members for member in others for result in member.results} == {(peer_id(1), peer_id(2))}


@in_virtual_time
async def test_a_member_that_only_says_that_it_gets_on_is_left_out_in_the_end() -> None:
    timing = dataclasses.replace(QUICK, max_closing_seconds=20.0)
    async with slow_network("diloco", 1, 2, 3, timing=timing) as network:
        stage(network, 3).seconds = math.inf
        for number in (1, 2, 3):
            stage(network, number).learn(*range(6 * number, 6 * number + 6))
        others = [stage(network, 1), stage(network, 2)]
        await until(lambda: all(member.round == 1 for member in others), PATIENCE_SECONDS)
        assert 20.0 < now() < 25.0


@pytest.mark.parametrize("codec", ["fp32", "topk"])
@in_virtual_time
async def test_a_member_that_answers_and_sends_nothing_is_named_long_before_the_deadline(codec: str) -> None:
    timing = dataclasses.replace(QUICK, average_seconds=1000.0, silence_seconds=2.0)
    async with network_of(make_config("diloco", codec=codec), 1, 2, 3, timing=timing) as network:

        async def hold(name: str, source: int, target: int) -> None:
            # With topk all others ask for what member 3 has; otherwise member 3 sends its parts.
            if name == "Exchange" and (target if codec == "topk" else source) == 3:
                await asyncio.Event().wait()

        network.before = hold
        for number in (1, 2, 3):
            network.peers[peer_id(number)].stage.learn(*range(6 * number, 6 * number + 6))
        others = [network.peers[peer_id(number)].stage for number in (1, 2)]
        await until(lambda: all(member.round == 1 for member in others), PATIENCE_SECONDS)
        assert now() < 10.0
        assert {result.members for member in others for result in member.results} == {(peer_id(1), peer_id(2))}
