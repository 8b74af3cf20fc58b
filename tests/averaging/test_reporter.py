"""What a peer reports, to which peers and in which order."""

import asyncio
from collections.abc import Coroutine
from typing import Any
from unittest.mock import patch

from tests.averaging.doubles import QUICK, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.support.virtual_time import in_virtual_time


@in_virtual_time
async def test_reports_go_out_in_the_order_of_ids() -> None:
    """So simulated faults come at the same calls in every run, whatever the hashes of ids are."""
    async with network_of(make_config(), *range(1, 13)) as network:
        await asyncio.sleep(QUICK.heartbeat_seconds / 2)
        first = [target for name, source, target in network.calls if (name, source) == ("Report", 1)][:11]
        assert first == list(range(2, 13))


@in_virtual_time
async def test_who_was_stopped_may_be_behind_from_the_moment_that_it_notices() -> None:
    async with network_of(make_config(), 1) as network:
        peer, spawned = network.peers[peer_id(1)], list[bool]()
        reporter = peer.averager.reporter
        await asyncio.sleep(0.01)

        def spawn(work: Coroutine[Any, Any, Any]) -> None:
            spawned.append(reporter.may_be_behind)
            work.close()

        with patch.object(peer.averager.context.tasks, "spawn", spawn):
            peer.clock.lost_seconds += QUICK.late_seconds
            await until(lambda: bool(spawned))
        assert spawned == [True]
        assert reporter.may_be_behind, "until it has asked the others"


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
