"""A leader that takes over waits until the other members have had the time to report to it."""

import asyncio

import pytest

from swarm.types import Block, PeerRecord
from tests.averaging.doubles import QUICK, Network, until
from tests.averaging.fake_stage import MICROBATCH, make_config
from tests.support.virtual_time import in_virtual_time

LISTED = 4


class SlowToNotice(Network):
    """Seven members, of which some notice later than the others that the leader is gone. In a large stage each knows
    those with the lowest ids, and few of the others."""

    def __init__(self, *, is_large: bool) -> None:
        super().__init__(make_config("diloco", microbatches=8))
        self.is_large = is_large
        self.before = self._before
        for number in range(1, 8):
            self.add(number)

    def directory(self, block: Block) -> list[PeerRecord]:
        return super().directory(block)[: LISTED if self.is_large else None]

    async def _before(self, name: str, source: int, target: int) -> None:
        if name == "Report" and source > LISTED and target == 2:
            await asyncio.sleep(0.5 * QUICK.fresh_seconds)


@pytest.mark.parametrize("is_large", [False, True], ids=["all are known", "few are known"])
@in_virtual_time
async def test_the_first_members_that_report_to_a_new_leader_do_not_leave_the_others_behind(is_large: bool) -> None:
    async with SlowToNotice(is_large=is_large) as network:
        stages = [peer.stage for peer in network.peers.values()][1:]
        await asyncio.sleep(3 * QUICK.fresh_seconds)  # The round is no longer young.
        network.kill(1)
        for number, stage in enumerate(stages):
            stage.learn(*range(3 * number, 3 * number + 3))
        await until(lambda: all(stage.round == 1 for stage in stages), seconds=20.0)
        assert [len(stage.results) for stage in stages] == [1] * 6, "none had to download"
        assert stages[0].results[0].num_samples == 18 * MICROBATCH
        assert len(stages[0].results[0].members) == 6
