"""A round with fewer samples does not replace the samples of a living member, whatever its line does."""

import asyncio

import pytest

from swarm.averaging.agreement.reports import MOST_FAILURES
from swarm.types import Block, PeerRecord
from tests.averaging.doubles import QUICK, Network, record, until
from tests.averaging.fake_stage import MICROBATCH, FakeStage, make_config
from tests.support.virtual_time import in_virtual_time

ROUND_MICROBATCHES = 8
HELD = range(5)
"""The microbatches of the holder: most of a round."""


class BusyLine(Network):
    """A stage of three: one holds most of a round, two newcomers have one microbatch, and little gets through.

    The next stage, of which nothing runs here, has committed its round already: so this one may end early.
    """

    def __init__(self, holder: int) -> None:
        super().__init__(make_config("diloco", microbatches=ROUND_MICROBATCHES, stages=2))
        self.before = self._before
        self.is_next_ahead = False
        self.blocked: tuple[str, ...] = ()
        """The names of calls that do not get through between the holder and the others."""
        self.number = holder
        self.holder = self.add(holder).stage
        self.newcomers = [self.add(number).stage for number in (2, 3)]

    def directory(self, block: Block) -> list[PeerRecord]:
        if block == Block(0):
            return super().directory(block)
        return [record(9, 1).model_copy(update={"round": int(self.is_next_ahead)})]

    async def _before(self, name: str, source: int, target: int) -> None:
        if name in self.blocked and source != target and self.number in (source, target):
            await asyncio.Event().wait()

    @property
    def stages(self) -> list[FakeStage]:
        return [self.holder, *self.newcomers]

    async def train(self, *, then_blocked: tuple[str, ...]) -> None:
        """Let all members report what they hold. After that the line is busy, and the next stage is ahead."""
        self.holder.learn(*HELD)
        self.newcomers[1].learn(5)
        await asyncio.sleep(4 * QUICK.heartbeat_seconds)
        assert all(stage.round == 0 for stage in self.stages)
        self.blocked = then_blocked
        self.is_next_ahead = True

    @property
    def num_attempts(self) -> int:
        return sum(peer.averager.counters().attempts for peer in self.peers.values())


@pytest.mark.parametrize("holder", [1, 5], ids=["it leads", "a newcomer leads"])
@pytest.mark.parametrize("call", ["Begin", "Exchange"])
@in_virtual_time
async def test_who_holds_the_round_is_waited_for_while_its_line_is_busy(call: str, holder: int) -> None:
    """The line may be busy with downloads. An attempt fails, and the next one would leave the holder out."""
    async with BusyLine(holder) as network:
        await network.train(then_blocked=(call,))
        await until(lambda: network.num_attempts == 3, seconds=20.0)
        assert all(stage.round == 0 for stage in network.stages)
        network.blocked = ()
        await until(lambda: all(stage.round == 1 for stage in network.stages), seconds=20.0)
        assert network.holder.num_installs == 0
        for stage in network.stages:
            assert stage.results[0].num_samples == (len(HELD) + 1) * MICROBATCH
            assert len(stage.results[0].members) == 3


@pytest.mark.parametrize("holder", [1, 5], ids=["it led", "a newcomer leads"])
@in_virtual_time
async def test_who_holds_the_round_is_waited_for_while_it_does_not_answer(holder: int) -> None:
    async with BusyLine(holder) as network:
        await network.train(then_blocked=("Report", "Begin", "Average", "Exchange", "Ping"))
        await asyncio.sleep(0.8 * QUICK.missed_seconds)
        assert all(stage.round == 0 for stage in network.newcomers)
        network.blocked = ()
        await until(lambda: all(stage.round == 1 for stage in network.stages))
        assert network.holder.results[0].num_samples >= len(HELD) * MICROBATCH
        assert len({stage.digest for stage in network.stages}) == 1


@in_virtual_time
async def test_who_never_gets_through_an_exchange_is_left_out_in_the_end_and_contributes_late() -> None:
    """The stage has to go on, because otherwise it would block the other stages for good. Nothing is lost by this."""
    async with BusyLine(5) as network:
        await network.train(then_blocked=("Exchange",))
        await until(lambda: network.newcomers[0].round == 1, seconds=120.0)
        assert network.num_attempts > MOST_FAILURES
        assert len(network.newcomers[0].results[0].members) == 2
        network.blocked = ()
        network.is_next_ahead = False
        await until(lambda: network.holder.round == 1)
        assert (network.holder.carried, network.holder.indices) == ([True], set(HELD))
        network.newcomers[0].learn(6, 7, 8)
        await until(lambda: all(stage.round == 2 for stage in network.stages))
        assert network.holder.results[-1].num_samples == ROUND_MICROBATCHES * MICROBATCH
