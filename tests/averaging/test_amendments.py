"""Amendments of which some peers hear before others: every round is averaged and applied under the same ones."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from swarm.config import Amendment, RunConfig, Timeline
from tests.averaging.doubles import Network, all_past, network_of, peer_id, stages, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.averaging.outcomes import assert_equal_and_once, result_vector
from tests.averaging.test_groups import grouped
from tests.support.locked import OWNER
from tests.support.virtual_time import in_virtual_time

NUM_MICROBATCHES = 6


def _locked(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, owner=OWNER.authority.fingerprint)


def _signed(config: RunConfig, round_number: int, setting: str = "averaging.codec=fp16") -> str:
    return Amendment.sign(OWNER, Timeline(config), round_number, [setting]).text


def _tell(network: Network, number: int, text: str) -> None:
    network.peers[peer_id(number)].averager.place.timeline.add([text])


def _learn(members: list[FakeStage], round_number: int) -> None:
    for offset in range(NUM_MICROBATCHES):
        members[offset % len(members)].learn(NUM_MICROBATCHES * round_number + offset)


def _is_rounded(stage: FakeStage, round_number: int) -> bool:
    vector = result_vector(stage, round_number)
    return bool(np.array_equal(vector, vector.astype(np.float16).astype(np.float32)))


@asynccontextmanager
async def _first_stage_has_decided() -> AsyncIterator[tuple[Network, list[FakeStage], list[FakeStage]]]:
    """Two stages of two peers, of which the first has decided round 0, and waits for the second."""
    async with network_of(_locked(make_config(stages=2))) as network:
        for number in (1, 2, 3, 4):
            network.add(number, (number - 1) // 2)
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        _learn(first, 0)
        await until(lambda: network.peers[peer_id(1)].averager.place.decision is not None)
        yield network, first, second


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@pytest.mark.parametrize("knowing", [1, 3], ids=["the leader knows", "a member knows"])
@in_virtual_time
async def test_one_peer_that_knows_is_enough(knowing: int, setting: str) -> None:
    config = _locked(make_config(setting))
    text = _signed(config, 1)
    async with network_of(config, 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        _tell(network, knowing, text)
        for number in range(3):
            _learn(members, number)
            await until(partial(all_past, members, number))
        assert_equal_and_once(members, rounds=3)
        timelines = [peer.averager.place.timeline for peer in network.peers.values()]
    assert {timeline.texts for timeline in timelines} == {(text,)}
    digest = timelines[0].last
    for stage in members:
        assert [result.amended for result in stage.results] == ["", digest, digest]
        assert [_is_rounded(stage, number) for number in range(3)] == [False, True, True]


@pytest.mark.parametrize("knowing", [0, 5], ids=["the leader knows", "a member knows"])
@in_virtual_time
async def test_with_groups_all_average_under_the_same_ones(knowing: int) -> None:
    config = _locked(grouped(3, microbatches=NUM_MICROBATCHES))
    text = _signed(config, 1)
    async with network_of(config, *range(9)) as network:
        members = stages(network, *range(9))
        _tell(network, knowing, text)
        for number in range(3):
            _learn(members, number)
            await until(partial(all_past, members, number))
        assert_equal_and_once(members, rounds=3)
        digest = network.peers[peer_id(0)].averager.place.timeline.last
    for stage in members:
        assert stage.num_installs == 0
        assert [result.amended for result in stage.results] == ["", digest, digest]
        assert [_is_rounded(stage, number) for number in range(3)] == [False, True, True]


@in_virtual_time
async def test_a_stage_that_has_decided_under_earlier_amendments_does_it_again() -> None:
    async with _first_stage_has_decided() as (network, first, second):
        # Nobody at the first stage has heard of it, and its result is decided already.
        _tell(network, 4, _signed(network.config, 0))
        _learn(second, 0)
        await until(partial(all_past, [*first, *second], 0))
        assert_equal_and_once(first)
        assert_equal_and_once(second)
        digest = network.peers[peer_id(1)].averager.place.timeline.last
    assert digest
    assert {stage.results[0].amended for stage in [*first, *second]} == {digest}
    assert all(_is_rounded(stage, 0) for stage in [*first, *second])


@in_virtual_time
async def test_a_result_that_may_be_committed_elsewhere_is_not_done_again() -> None:
    """All stages decide without the amendment, and then a stage hears of it: it holds from the next round on."""
    async with _first_stage_has_decided() as (network, first, second):
        _tell(network, 1, _signed(network.config, 0))
        _learn(second, 0)
        await until(partial(all_past, [*first, *second], 0))
        _learn(first, 1)
        _learn(second, 1)
        await until(partial(all_past, [*first, *second], 1))
        assert_equal_and_once(first, rounds=2)
        assert_equal_and_once(second, rounds=2)
        digest = network.peers[peer_id(1)].averager.place.timeline.last
    for stage in [*first, *second]:
        assert [result.amended for result in stage.results] == ["", digest]


@pytest.mark.parametrize("is_far", [False, True], ids=["applies", "downloads"])
@in_virtual_time
async def test_a_peer_that_was_away_has_them_with_the_state(is_far: bool) -> None:
    config = _locked(make_config())
    async with network_of(config, 1, 2) as network:
        members = stages(network, 1, 2)
        _learn(members, 0)
        await until(partial(all_past, members, 0))
        _tell(network, 1, _signed(config, 2))
        newcomer = network.add(3)
        if not is_far:
            await until(lambda: newcomer.stage.round == 1)
            network.cut = {frozenset({3, other}) for other in (1, 2)}
        for number in (1, 2, 3):
            _learn(members, number)
            await until(partial(all_past, members, number))
        network.cut = set()
        await until(lambda: newcomer.stage.round == 4)
        await asyncio.sleep(1.0)
        _learn([*members, newcomer.stage], 4)
        await until(partial(all_past, [*members, newcomer.stage], 4))
        assert {stage.digest for stage in [*members, newcomer.stage]} == {members[0].digest}
    digest = newcomer.averager.place.timeline.last
    assert digest
    assert newcomer.stage.results[-1].amended == digest
    assert peer_id(3) in members[0].results[-1].members


@pytest.mark.parametrize("times", [2, 0.5], ids=["longer", "shorter"])
@in_virtual_time
async def test_with_diloco_rounds_are_of_the_size_that_is_in_force(times: float) -> None:
    config = _locked(make_config("diloco"))
    size = int(times * config.rounds.round_samples)
    num = size // config.data.microbatch_size
    async with network_of(config, 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        # A leader that does not know takes a longer round for whole too early, and hears of it then.
        _tell(network, 3 if times > 1 else 1, _signed(config, 1, f"rounds.round_samples={size}"))
        _learn(members, 0)
        await until(partial(all_past, members, 0))
        for offset in range(num):
            if offset == num - 1:
                await asyncio.sleep(5.0)
                assert {stage.round for stage in members} == {1}, "a microbatch of the round is missing"
            members[offset % 3].learn(NUM_MICROBATCHES + offset)
        await until(partial(all_past, members, 1), seconds=60.0)
        assert_equal_and_once(members, rounds=2)
    assert [[result.num_samples for result in stage.results] for stage in members] == [
        [config.rounds.round_samples, size]
    ] * 3


@pytest.mark.parametrize("num", [4, 9], ids=["shorter", "longer"])
@in_virtual_time
async def test_synchronous_rounds_of_another_size_follow_one_another(num: int) -> None:
    """Members that hear of it only while the round goes on may have microbatches that are not of it any more."""
    config = _locked(make_config())
    async with network_of(config, 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        _learn(members, 0)
        await until(partial(all_past, members, 0))
        for offset in range(4):
            members[offset % 3].learn(NUM_MICROBATCHES + offset)
        members[1].learn(NUM_MICROBATCHES + 4)
        _tell(network, 3, _signed(config, 1, f"rounds.round_samples={2 * num}"))
        members[2].learn(NUM_MICROBATCHES + 5)
        for offset in range(6, num):
            await asyncio.sleep(1.0)
            assert {stage.round for stage in members} == {1}, "a microbatch of the round is missing"
            members[0].learn(NUM_MICROBATCHES + offset)
        await until(partial(all_past, members, 1), seconds=60.0)
        for offset in range(num):
            members[offset % 3].learn(NUM_MICROBATCHES + num + offset)
        await until(partial(all_past, members, 2), seconds=60.0)
        assert_equal_and_once(members, rounds=3)
    assert [result.num_samples for result in members[0].results] == [2 * NUM_MICROBATCHES, 2 * num, 2 * num]
    assert [stage.dropped for stage in members] == ([set(), {10}, {11}] if num == 4 else [set()] * 3)
