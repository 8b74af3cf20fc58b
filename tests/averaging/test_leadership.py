"""When a leader looks at the round, and how soon it begins an attempt."""

import asyncio
import dataclasses
from functools import partial

import pytest

from swarm.averaging.agreement.blame import AttemptFailed
from swarm.averaging.leadership import MOST_REASONS, OTHERWISE
from swarm.errors import PeerUnavailable
from swarm.types import PeerId
from tests.averaging.doubles import QUICK, all_past, broken, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.support.virtual_time import in_virtual_time


@in_virtual_time
async def test_what_was_held_up_by_a_member_begins_as_soon_as_that_is_known_to_be_gone() -> None:
    async with network_of(make_config("diloco"), 1, 2) as network:
        time = asyncio.get_running_loop().time
        await asyncio.sleep(QUICK.takeover_seconds)  # As long as a new leader waits anyway
        network.freeze(2)
        await asyncio.sleep(2.5 * QUICK.heartbeat_seconds)
        roster = network.peers[peer_id(1)].averager.roster
        survivor = stages(network, 1)[0]
        survivor.learn(0, 1, 2, 3, 4, 5)
        await until(lambda: PeerId(peer_id(2)) in roster.suspicions.suspected)
        gone_at = time()
        await until(lambda: survivor.round == 1)
        assert time() - gone_at < 0.5 * QUICK.heartbeat_seconds


@pytest.mark.parametrize("method", ["Begin", "Commit"])
@in_virtual_time
async def test_one_that_is_never_in_time_does_not_make_each_round_longer_than_the_one_before(method: str) -> None:
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        broken(network, 3, method, "late")
        time = asyncio.get_running_loop().time
        for number in range(5):
            await until(lambda: members[2].round == number)  # noqa: B023 - awaited at once
            began_at = time()
            members[2].learn(20 + number)
            members[0].learn(4 * number, 4 * number + 1)
            members[1].learn(4 * number + 2, 4 * number + 3)
            await until(partial(all_past, members[:2], number), seconds=60.0)
            await until(lambda: len(network.peers[peer_id(1)].averager.view().progress) == 3)
            assert time() - began_at < 5 * QUICK.commit_seconds


@in_virtual_time
async def test_a_leader_tries_again_however_often_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        if leading.num_attempts % 2:
            raise PeerUnavailable("a stage that shares parameters is away all night")
        raise AttemptFailed(f"nothing came within {leading.num_attempts} s")

    timing = dataclasses.replace(QUICK, max_retry_seconds=QUICK.retry_seconds)
    async with network_of(make_config("diloco"), 1, timing=timing) as network:
        (stage,), leading = stages(network, 1), network.peers[peer_id(1)].averager.lead_loop
        with monkeypatch.context() as patch:
            patch.setattr(leading.round, "attempt", fail)
            stage.learn(0, 1, 2, 3, 4, 5)
            await until(lambda: leading.num_attempts > 1100, seconds=120.0)
            assert stage.round == 0
        assert leading.aborted[OTHERWISE] > 400
        assert len(leading.aborted) == MOST_REASONS + 1
        await until(lambda: stage.round == 1)
