"""What a peer takes itself for after a stop, and how soon a member is missed."""

import asyncio
from collections.abc import Coroutine
from typing import Any
from unittest.mock import patch

from tests.averaging.doubles import QUICK, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.support.virtual_time import in_virtual_time


@in_virtual_time
async def test_who_was_stopped_may_be_behind_from_the_moment_that_it_notices() -> None:
    async with network_of(make_config(), 1) as network:
        peer, spawned = network.peers[peer_id(1)], list[bool]()
        reporter = peer.averager.reporter
        await asyncio.sleep(0.01)

        def spawn(work: Coroutine[Any, Any, Any]) -> None:
            spawned.append(reporter.may_be_behind())
            work.close()

        with patch.object(peer.averager.context.tasks, "spawn", spawn):
            peer.clock.lost_seconds += QUICK.late_seconds
            await until(lambda: bool(spawned))
        assert spawned == [True]
        assert reporter.may_be_behind(), "until it has asked the others"


@in_virtual_time
async def test_a_member_that_is_killed_is_missed_before_its_next_heartbeat_is_due() -> None:
    async with network_of(make_config(), 1, 2) as network:
        view, time = network.peers[peer_id(1)].averager.view, asyncio.get_running_loop().time
        await asyncio.sleep(2 * QUICK.heartbeat_seconds)
        stages(network, 2)[0].learn(3, 4)
        await until(lambda: view().committed == {3, 4})
        network.kill(2)
        killed_at = time()
        await until(lambda: not view().committed)
        assert time() - killed_at < 1.2 * QUICK.heartbeat_seconds
